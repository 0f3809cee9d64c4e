"""Which sizes, how far ahead and with whom: every answer with every other, by what makes workers slow.

Eight workers, simulated in every cell with communication that takes no time, and trained for real in some. What counts
is samples/s over the sum of the workers' speeds, and how many global batches a push has missed.
"""

import dataclasses
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from harness import learning, record, regimes, tasks, tuning
from harness.regimes import EPISODES, REGIMES, SECONDS, SPEEDS
from harness.workers import run_workers

from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import Silent

LOADS = ("bsp", "lb-bsp", "dbs")
SYNCS = ("barrier", "ssp", "dssp", "asp")
ONE, BY_RANK, BY_SPEED = GROUPS = ("one group", "4 groups", "4 by speed")
SIZE = 20
"""Samples of a worker's iteration, of the mean speed."""
ITERATIONS, EPOCH = 480, 60
"""Of a simulated run and of its epochs, in global batches."""


class Cell(NamedTuple):
    regime: str
    load: str
    sync: str
    groups: str

    @property
    def scheme(self):
        """As a string."""
        if self.groups == ONE:
            return self.load if self.sync == "barrier" else f"{self.sync}:load={self.load}"
        by = ",by=speed" if self.groups == BY_SPEED else ""
        across = "bsp" if self.sync == "barrier" else self.sync
        return str(parse_scheme(f"grouped:groups=4{by},inside={self.load},across={across}"))


CELLS = [
    Cell(regime, load, sync, groups) for regime in REGIMES for groups in GROUPS for sync in SYNCS for load in LOADS
]
TRAINED = [
    Cell("persistent", "bsp", "barrier", ONE), Cell("persistent", "lb-bsp", "barrier", ONE),
    Cell("persistent", "bsp", "asp", BY_RANK), Cell("episodic", "lb-bsp", "dssp", BY_RANK),
    Cell("jitter", "bsp", "asp", ONE), Cell("jitter", "lb-bsp", "ssp", BY_RANK),
    Cell("mixed", "lb-bsp", "barrier", ONE), Cell("mixed", "lb-bsp", "ssp", ONE),
    Cell("mixed", "lb-bsp", "ssp", BY_RANK),
]  # fmt: skip
PASSES, EPOCHS = 4, 2
"""Over the digits in an epoch, so that it is long, and epochs."""
MAKE, GRID = partial(torch.optim.SGD, momentum=0.9), [0.05 * 2**k for k in range(6)]
SAME, NOISE = "<= 0.03", 0.005


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--simulated", action="store_true", help="train nothing")
    options = parser.parse_args()
    iterations = ITERATIONS // 10 if options.quick else ITERATIONS
    began = time.monotonic()
    cells = {cell: _simulated(cell, options.seed, iterations, EPOCH * _batch()) for cell in CELLS}
    record.console.print(f"  {len(cells)} cells simulated in {time.monotonic() - began:.0f} s")
    trained = {} if options.simulated else _trained(options)
    done = record.publish(
        "combinations",
        f"Sizes, how far ahead and groups, {len(SPEEDS)} workers",
        options,
        config={
            "regimes": REGIMES, "speeds": SPEEDS, "episodes": EPISODES, "global_batch_size": _batch(),
            "iteration_seconds": SECONDS, "iterations": iterations, "epoch_iterations": EPOCH,
            "schemes": {_name(cell): cell.scheme for cell in CELLS if cell.regime == "jitter"},
            "trained": {"task": "sklearn.datasets.load_digits", "passes": PASSES * EPOCHS, "epochs": EPOCHS,
                        "optimizer": "SGD, momentum 0.9", "runs": 1},
        },
        figures=[*_figures(cells), *_fidelity(trained)],
        tables=[*(_table(cells, regime) for regime in REGIMES), *([_trained_table(trained)] if trained else [])],
        raw={
            "simulated": [{**cell._asdict(), "scheme": cell.scheme, **each} for cell, each in cells.items()],
            "trained": [{**cell._asdict(), **each, "curve": len(each["curve"])} for cell, each in trained.items()],
        },
        overrun=record.overruns({cell.scheme: [learning.overruns(each)] for cell, each in trained.items()})
        if trained else None,
    )  # fmt: skip
    return 0 if done else 1


def _batch():
    return SIZE * len(SPEEDS)


def _name(cell):
    return f"{cell.load}, {cell.sync}, {cell.groups}"


# In virtual time.


def _simulated(cell, seed, iterations, epoch, *, drop_last=False):
    """Samples/s, that over the sum of the speeds, and global batches that a push has missed; or why it is refused."""
    try:
        scenario = Scenario(
            cluster=regimes.cluster(cell.regime, seed, _batch()), scheme=parse_scheme(cell.scheme),
            global_batch_size=_batch(), iterations=iterations, epoch_samples=epoch, drop_last=drop_last,
        )  # fmt: skip
    except ConfigError as error:
        return {"refused": str(error)}
    missed = [_Missed() for _ in SPEEDS]
    result = simulate(scenario, log=Log(workers=missed, server=Silent()))
    pushes = sum(each.pushes for each in missed)
    return {
        "samples_per_second": result.samples_per_second,
        "over_speeds": result.over_ideal,
        "staleness": sum(each.batches for each in missed) / pushes,
    }


class _Missed:
    """Sums what one worker's pushes have missed."""

    def __init__(self):
        self.pushes, self.batches = 0, 0.0

    def record(self, event):
        if event.kind == "iteration":
            self.pushes += 1
            self.batches += event.behind or 0.0

    def close(self):
        pass


# For real.


def _trained(options):
    task, cells = tasks.digits(), TRAINED[1:3] if options.quick else TRAINED
    rate = tuning.tuned(
        task, MAKE, GRID, batch=_batch(), epochs=PASSES * EPOCHS, folds=1 if options.quick else tuning.FOLDS
    )
    with tempfile.TemporaryDirectory() as folder:
        work = {"folder": folder, "seed": options.seed, "rate": rate["rate"], "epochs": 1 if options.quick else EPOCHS,
                "cells": cells}  # fmt: skip
        began = time.monotonic()
        rows = run_workers(len(SPEEDS), _train_all, work, record.console.print)
    record.console.print(f"  {len(rows)} runs in {(time.monotonic() - began) / 60:.1f} minutes")
    length = PASSES * len(task.train[1])
    slices = length // _batch() * work["epochs"]
    for cell, row in zip(cells, rows, strict=True):
        row["rate"] = rate["rate"]
        row["simulated"] = _simulated(cell, options.seed, slices, length, drop_last=True)
    return dict(zip(cells, rows, strict=True))


def _train_all(rank, work, tell):
    torch.set_flush_denormal(True)
    task, rows = tasks.digits(), []
    # Whatever is imported and set up only once is so before anything is timed.
    warm_up = dataclasses.replace(_run(Cell("persistent", "bsp", "asp", ONE), work), passes=1, epochs=1)
    learning.train(warm_up, task, Path(work["folder"]) / "warm-up")
    for number, cell in enumerate(work["cells"]):
        row = learning.train(_run(cell, work), task, Path(work["folder"]) / str(number))
        if rank == 0:
            speeds = sum(
                samples / seconds
                for samples, seconds in zip(row["samples_by_worker"], row["compute_by_worker"], strict=True)
            )
            row |= {"samples_per_second": row["samples"] / row["seconds"]}
            rows.append(row | {"over_speeds": row["samples_per_second"] / speeds})
            tell(
                f"  {cell.regime}, {cell.scheme}: {row['seconds']:.1f} s, {rows[-1]['over_speeds']:.3f}, accuracy"
                f" {100 * row['accuracy']:.1f}, staleness {row['mean_staleness']:.2f}"
            )
    return rows


def _run(cell, work):
    return learning.Run(
        scheme=cell.scheme, seed=work["seed"], optimizer=partial(MAKE, lr=work["rate"]),
        cluster=regimes.cluster(cell.regime, work["seed"], _batch()), global_batch_size=_batch(),
        epochs=work["epochs"], passes=PASSES, copy_every=10**9,
    )  # fmt: skip


# What is shown.


def _figures(cells):
    """What groups of balanced workers that keep a bound are worth beside what they are made of."""
    figures = []
    for regime in REGIMES:
        for sync in ("ssp", "dssp"):
            here, parts = Cell(regime, "lb-bsp", sync, BY_RANK), [("barrier", ONE), (sync, ONE)]
            for other in [Cell(regime, "lb-bsp", *part) for part in parts]:
                ratio = cells[here]["samples_per_second"] / cells[other]["samples_per_second"]
                name = f"{regime}: lb-bsp in 4 groups under {sync}, samples/s over {other.scheme}"
                figures += [record.figure(name, [ratio])]
    for sync in ("ssp", "dssp"):
        cell = Cell("episodic", "lb-bsp", sync, ONE)
        name = f"episodic: {cell.scheme}, over the sum of the speeds"
        figures += [record.figure(name, [cells[cell]["over_speeds"]], goal=">= 0.9")]
    return figures


def _fidelity(trained):
    if not trained:
        return []
    off = [abs(row["samples_per_second"] / row["simulated"]["samples_per_second"] - 1) for row in trained.values()]
    return [record.figure("trained, off the simulator by", off, goal=SAME)]


def _table(cells, regime):
    """What is made of the speeds, and how stale the pushes are."""
    of = {cell: each for cell, each in cells.items() if cell.regime == regime}

    def told(cell):
        each = of[cell]
        if "refused" in each:
            return f"refused: {each['refused']}"
        better = any(_no_worse(other, each) and not _no_worse(each, other) for other in of.values())
        return f"{each['over_speeds']:.3f} at {each['staleness']:.2f}{'' if better else ' *'}"

    return record.table(
        f"{regime} ({REGIMES[regime]}): samples/s over the sum of the speeds, and global batches that a push has"
        " missed; * where no other does more of one and no worse in the other",
        ("", *LOADS),
        [
            [f"{sync}, {groups}", *(told(Cell(regime, load, sync, groups)) for load in LOADS)]
            for groups in GROUPS
            for sync in SYNCS
        ],
    )


def _no_worse(one, other):
    """Within what noise may do."""
    if "refused" in one or "refused" in other:
        return "refused" in other
    return one["over_speeds"] >= other["over_speeds"] - NOISE and one["staleness"] <= other["staleness"] + NOISE


def _trained_table(trained):
    return record.table(
        "trained on digits, one run each: over the sum of the speeds (simulated), samples/s beside the simulator's",
        (
            "",
            "scheme",
            "over the speeds",
            "simulated",
            "samples/s",
            "simulated ",
            "accuracy %",
            "staleness",
            "simulated  ",
        ),
        [
            [
                cell.regime,
                cell.scheme,
                f"{row['over_speeds']:.3f}",
                f"{row['simulated']['over_speeds']:.3f}",
                f"{row['samples_per_second']:.1f}",
                f"{row['simulated']['samples_per_second']:.1f}",
                f"{100 * row['accuracy']:.1f}",
                f"{row['mean_staleness']:.2f}",
                f"{row['simulated']['staleness']:.2f}",
            ]
            for cell, row in trained.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

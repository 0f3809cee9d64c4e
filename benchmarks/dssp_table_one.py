"""Table I of DSSP, scaled down: seconds to an accuracy on two workers, of which one is 2.17 times as fast.

Counted twice. By global samples, which is how evenstep counts: epochs, and the learning rate's fall with them, are of
what all workers have computed on. And by the fast worker's own samples, as we infer that the table was counted: its
epoch is over when it alone has computed on as many samples as there are. The processes, the communication and the
training are real; part of the training labels are wrong, so that the accuracy jumps when the learning rate falls, as
in the paper.
"""

import sys
import tempfile
import time
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean

import torch
from harness import clusters, learning, record, tasks
from harness.workers import run_workers

from evenstep.cluster.slowness import AffineCurve

RATIO, FAST_SECONDS, PART = 2.17, 0.008, 40
"""The fast worker, which is the last, takes these seconds for its part of a global batch of two."""
EPOCHS, FALL_AT, FALL_TO = 15, 10, 0.1
NOISE, LEARNING_RATE = 0.4, 0.4
TARGET, HELD = 0.925, 20
"""Held in so many evaluations in a row, one after each of the fast worker's steps, as accuracies jump about before."""
SEEDS = 2
BSP, ASP, CLAMPED, UNBOUNDED = "BSP", "ASP", "DSSP 3..15", "DSSP 3..15, not bounded"
SSP = ("SSP 3", "SSP 6", "SSP 15")
SCHEMES = {
    BSP: "bsp:engine=server",
    ASP: "asp:rate=raw",
    **{name: f"ssp:bound={name.removeprefix('SSP ')},rate=raw" for name in SSP},
    CLAMPED: "dssp:lower=3,upper=15,rate=raw",
    UNBOUNDED: "dssp:lower=3,upper=15,bounded=false,rate=raw",
}
"""At raw rates, as in the paper: every push is a step of the whole learning rate."""
OWN, GLOBAL = "own", "global"
SETTINGS = {
    f"1 : {RATIO}, fast worker's own samples": (RATIO, OWN),
    f"1 : {RATIO}, global samples": (RATIO, GLOBAL),
    "equal, global samples": (1.0, GLOBAL),
}
"""By what is counted: the speeds' ratio, and how."""
RATIOS = {
    "BSP/DSSP": (
        (BSP,), 2.04,
        "A barrier runs at the slow worker's rate, so this is the ratio of speeds where only the fast one's samples"
        " count and nothing bounds it, and less where the slow one's count too.",
    ),
    "SSP/DSSP": (
        SSP, 1.85,
        "With lasting unequal speeds any bounded lead is used up, and the fast worker then runs at the slow one's rate,"
        " under clamped DSSP as well: only without a bound can DSSP be this much faster than SSP.",
    ),
    "ASP/DSSP": (
        (ASP,), 0.99,
        "DSSP without a bound hardly ever waits, which makes it ASP; clamped, it is slower by the ratio of the rates.",
    ),
}  # fmt: skip
"""What is compared with DSSP, the paper's ratio of times to 0.67 (mixed GPUs), and where it comes from."""


def main():
    options = record.arguments(__doc__).parse_args()
    seeds = [options.seed + number for number in range(1 if options.quick else SEEDS)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = {"folder": folder, "seeds": seeds, "epochs": 3 if options.quick else EPOCHS}
        rows = run_workers(2, _train_all, work, record.console.print)
    took = time.monotonic() - began
    for row in rows:
        row["seconds_to_target"] = learning.seconds_to(row, TARGET, HELD)
    record.console.print(f"  {len(rows)} runs in {took / 60:.1f} minutes")
    done = record.publish(
        "dssp_table_one",
        f"DSSP's Table I scaled down: seconds to {100 * TARGET:g} %",
        options,
        config={
            "ratio_of_speeds": RATIO, "fast_seconds": FAST_SECONDS, "global_batch_size": 2 * PART,
            "epochs": work["epochs"], "learning_rate": LEARNING_RATE, "falls_to": FALL_TO,
            "falls_after": FALL_AT / EPOCHS, "wrong_training_labels": NOISE,
            "target": TARGET, "held_in_evaluations": HELD, "seeds": seeds, "schemes": SCHEMES,
            "paper": {name: paper for name, (_, paper, _) in RATIOS.items()}, "run_minutes": took / 60,
        },
        figures=_figures(rows),
        tables=[*(_times(rows, setting) for setting in SETTINGS), _ratios(rows)],
        raw=[{**row, "curve": " ".join(f"{s:g}:{value:g}" for s, _, value in row["curve"])} for row in rows],
        overrun=record.overruns(_overruns(rows)),
    )  # fmt: skip
    for name, (_, _, why) in RATIOS.items():
        record.console.print(f"{name}: {why}")
    return 0 if done else 1


# In the workers.


def _train_all(rank, work, tell):
    torch.set_flush_denormal(True)
    task, rows = tasks.digits(noise=NOISE), []
    # Whatever is imported and set up only once is so before anything is timed.
    learning.train(_run(BSP, 1.0, GLOBAL, 0, 1, task), task, Path(work["folder"]) / "warm-up")
    for seed in work["seeds"]:
        for setting, (ratio, counted) in SETTINGS.items():
            for name in SCHEMES:
                run = _run(name, ratio, counted, seed, work["epochs"], task)
                folder = Path(work["folder"]) / f"{seed}, {setting}, {name}"
                row = learning.train(run, task, folder)
                if rank == 0:
                    rows.append({"setting": setting, "name": name, **row})
                    tell(
                        f"  seed {seed}, {setting}, {name}: {row['seconds']:.2f} s, to the target"
                        f" {_seconds(learning.seconds_to(row, TARGET, HELD))}, accuracy {100 * row['accuracy']:.1f},"
                        f" overrun in {learning.overrun_share(row):.1%}"
                    )
    return rows


def _run(name, ratio, counted, seed, epochs, task):
    samples = len(task.train[1])
    # By the time that the fast worker has been through its own epochs, the other has done as much, or its part.
    fast_share = 1 / ratio if name in (ASP, UNBOUNDED) else 1.0
    passes = epochs if counted == GLOBAL else ceil(epochs * (1 + fast_share))
    falls_after = epochs * samples * FALL_AT / EPOCHS

    def rate(handed_out, own):
        # There are two workers: what is not this one's is the other's.
        done = handed_out if counted == GLOBAL else max(own, handed_out - own)
        return FALL_TO if done >= falls_after else 1.0

    curves = [AffineCurve(seconds_per_sample=FAST_SECONDS / PART * slowness) for slowness in (ratio, 1.0)]
    return learning.Run(
        scheme=SCHEMES[name],
        seed=seed,
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
        cluster=clusters.cluster_of(curves),
        global_batch_size=2 * PART,
        epochs=1,
        passes=passes,
        rate=rate,
    )


def _seconds(value):
    return "never" if value is None else f"{value:.2f} s"


# What is shown.


def _runs(rows, setting, names):
    return [row for row in rows if row["setting"] == setting and row["name"] in names]


def _over(rows, setting, names, dssp):
    """Their seconds to the target over DSSP's, one value per seed of all that got there."""
    theirs = {row["seed"]: row["seconds_to_target"] for row in _runs(rows, setting, (dssp,))}
    ratios = {}
    for row in _runs(rows, setting, names):
        if row["seconds_to_target"] is not None and theirs[row["seed"]] is not None:
            ratios.setdefault(row["seed"], []).append(row["seconds_to_target"] / theirs[row["seed"]])
    return [fmean(each) for each in ratios.values()]


def _figures(rows):
    reached = fmean(row["seconds_to_target"] is not None for row in rows)
    return [record.figure("part of the runs that reached the target", [reached], goal=">= 1")] + [
        record.figure(f"{setting}: {name}, {dssp.partition(', ')[2] or 'clamped'} (paper {paper:g})", values)
        for setting in SETTINGS
        for name, (names, paper, _) in RATIOS.items()
        for dssp in (UNBOUNDED, CLAMPED)
        if (values := _over(rows, setting, names, dssp))
    ]


def _times(rows, setting):
    lines = []
    for name in SCHEMES:
        runs = _runs(rows, setting, (name,))
        lines.append(
            [
                name,
                " ".join(_seconds(row["seconds_to_target"]) for row in runs),
                f"{fmean(row['seconds'] for row in runs):.2f}",
                f"{fmean(max(row['samples_by_worker']) / sum(row['samples_by_worker']) for row in runs):.2f}",
                f"{fmean(row['mean_staleness'] for row in runs):.2f}",
                " ".join(f"{100 * row['accuracy']:.1f}{' DIVERGED' if row['diverged'] else ''}" for row in runs),
            ]
        )
    headings = ("scheme", "s to target", "s in all", "fast worker's part", "staleness", "final accuracy %")
    return record.table(setting, headings, lines)


def _ratios(rows):
    """The paper's ratios beside ours, by how DSSP is read and how it is counted."""

    def shown(values):
        return f"{fmean(values):.2f}" if values else "-"

    return record.table(
        "Times to the target over DSSP's, the paper's in brackets",
        ("setting", "DSSP", *(f"{name} ({paper:g})" for name, (_, paper, _) in RATIOS.items())),
        [
            [
                setting,
                dssp.partition(", ")[2] or "clamped",
                *(shown(_over(rows, setting, names, dssp)) for names, _, _ in RATIOS.values()),
            ]
            for setting in SETTINGS
            for dssp in (UNBOUNDED, CLAMPED)
        ],
    )


def _overruns(rows):
    by_name = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(learning.overruns(row))
    return by_name


if __name__ == "__main__":
    sys.exit(main())

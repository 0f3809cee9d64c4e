"""Accuracy at equal global samples by the number of groups: 16 workers, one four times slower, trained for real.

Emulated devices; the processes, the server and the training are real. All sizes are equal. The learning rate is tuned
for one group, in one process and never on the test set. One group is trained without the delay, which nothing but its
clock depends on.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

import torch
from harness import clusters, learning, record, tasks, tuning
from harness.workers import run_workers

from evenstep.cluster.slowness import Constant

WORKERS, SLOW, SLOWDOWN, SECONDS = 16, 5, 4.0, 0.1
"""The slow worker, how many times slower, and the seconds of an undisturbed iteration."""
ONE, PROGRESSIVE = "grouped:groups=1", "grouped"
SCHEMES = (ONE, *(f"grouped:groups={count}" for count in (2, 4, 8, 16)), PROGRESSIVE)
TASKS = {
    "digits": {"make": tasks.digits, "batch": 80, "epochs": 12, "schemes": SCHEMES},
    # Of as many iterations as it takes to learn them, so in fewer cases.
    "letters": {"make": tasks.letters, "batch": 160, "epochs": 12, "schemes": (ONE, SCHEMES[2], PROGRESSIVE)},
}
MAKE = partial(torch.optim.SGD, momentum=0.9)
GRID = [0.05 * 2**k for k in range(6)]
SEEDS, LARGEST_LOSS = 3, "<= 1"


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    options = parser.parse_args()
    made = {name: TASKS[name]["make"]() for name in options.tasks}
    rates = {
        name: tuning.tuned(
            made[name], MAKE, GRID, batch=TASKS[name]["batch"], epochs=TASKS[name]["epochs"],
            folds=1 if options.quick else tuning.FOLDS,
        )
        for name in options.tasks
    }  # fmt: skip
    record.console.print("  tuned: " + ", ".join(f"{name} {each['rate']:g}" for name, each in rates.items()))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "folder": folder,
            "epochs": {name: 2 if options.quick else TASKS[name]["epochs"] for name in options.tasks},
            "rates": {name: each["rate"] for name, each in rates.items()},
            "seeds": [options.seed + number for number in range(1 if options.quick else SEEDS)],
        }
        rows = run_workers(WORKERS, _train_all, work, record.console.print)
    took = (time.monotonic() - began) / 60
    record.console.print(f"  {len(rows)} runs in {took:.1f} minutes")
    done = record.publish(
        "group_accuracy",
        f"Accuracy at equal global samples by groups, one worker of {WORKERS} {SLOWDOWN:g}x slower",
        options,
        config={
            "workers": WORKERS, "slow_worker": SLOW, "slowdown": SLOWDOWN, "iteration_seconds": SECONDS,
            "optimizer": "SGD, momentum 0.9", "tuned": rates, "seeds": work["seeds"],
            "tasks": {
                name: {"source": made[name].source, "global_batch_size": TASKS[name]["batch"],
                       "epochs": work["epochs"][name], "schemes": TASKS[name]["schemes"]}
                for name in options.tasks
            },
            "run_minutes": took,
        },
        figures=[
            record.figure(
                f"{task}: points lost to one group, {_short(scheme)}", [_lost(rows, task, scheme)],
                goal=LARGEST_LOSS if scheme == PROGRESSIVE else None,
            )
            for task in options.tasks
            for scheme in TASKS[task]["schemes"][1:]
        ],
        tables=[_table(rows, task, work["rates"][task]) for task in options.tasks],
        raw=[{**row, "curve": len(row["curve"])} for row in rows],
        overrun=record.overruns(
            {scheme: [learning.overruns(row) for row in rows if row["scheme"] == scheme]
             for scheme in SCHEMES if any(row["scheme"] == scheme for row in rows)}
        ),
    )  # fmt: skip
    return 0 if done else 1


# In the workers.


def _train_all(rank, work, tell):
    torch.set_flush_denormal(True)
    made, rows = {name: TASKS[name]["make"]() for name in work["epochs"]}, []
    # Whatever is imported and set up only once is so before anything is trained.
    first, warm_up = next(iter(made)), {**work, "epochs": dict.fromkeys(made, 1)}
    learning.train(_run(first, ONE, 0, warm_up), made[first], Path(work["folder"]) / "warm-up")
    for task in made:
        for seed in work["seeds"]:
            for scheme in TASKS[task]["schemes"]:
                folder = Path(work["folder"]) / f"{task}-{seed}-{scheme.replace(':', '-')}"
                row = learning.train(_run(task, scheme, seed, work), made[task], folder)
                if rank == 0:
                    rows.append({"task": task, **row})
                    tell(f"  {_told(rows[-1])}")
    return rows


def _run(task, scheme, seed, work):
    batch = TASKS[task]["batch"]
    return learning.Run(
        scheme=scheme,
        seed=seed,
        optimizer=partial(MAKE, lr=work["rates"][task]),
        cluster=clusters.cluster_of(
            clusters.proportional([1] * WORKERS, batch, SECONDS),
            [] if scheme == ONE else [(SLOW, Constant(factor=SLOWDOWN))],
        ),
        global_batch_size=batch,
        epochs=work["epochs"][task],
        copy_every=10**9,
    )


def _told(row):
    return (
        f"{row['task']}, seed {row['seed']}, {row['scheme']}: accuracy {100 * row['accuracy']:.1f},"
        f" {row['seconds']:.1f} s, staleness {row['mean_staleness']:.2f}, overrun in {learning.overrun_share(row):.1%}"
    )


# What is shown.


def _of(rows, task, scheme):
    return [row for row in rows if (row["task"], row["scheme"]) == (task, scheme)]


def _lost_by_seed(rows, task, scheme):
    return [
        100 * (whole["accuracy"] - row["accuracy"])
        for whole, row in zip(_of(rows, task, ONE), _of(rows, task, scheme), strict=True)
    ]


def _lost(rows, task, scheme):
    return fmean(_lost_by_seed(rows, task, scheme))


def _short(scheme):
    return scheme.partition("groups=")[2] or "progressive"


def _table(rows, task, rate):
    lines = []
    for scheme in TASKS[task]["schemes"]:
        runs = _of(rows, task, scheme)
        values = [100 * row["accuracy"] for row in runs]
        lines.append(
            [
                _short(scheme),
                f"{fmean(values):.1f} +- {pstdev(values):.1f}",
                " ".join(f"{points:+.1f}" for points in _lost_by_seed(rows, task, scheme)),
                f"{fmean(row['mean_staleness'] for row in runs):.2f}",
                " ".join(str(max(len(groups) for groups in row["groups"])) for row in runs),
                f"{fmean(row['seconds'] for row in runs):.1f}" + (" without delay" if scheme == ONE else ""),
            ]
        )
    headings = ("groups", "accuracy %", "lost by seed", "staleness", "groups formed", "s in all")
    return record.table(f"{task}, learning rate {rate:g}", headings, lines)


if __name__ == "__main__":
    sys.exit(main())

"""At which rate a group's gradient should enter: every rule that `rate=` knows, on real gradients in virtual time.

As in rate_study.py, where a group is a worker that pushes its part of the global batch and takes as long as its slowest
member. One of 16 workers is four times slower.
"""

import itertools
import sys
import time
from statistics import mean, pstdev

import torch
from harness import record
from rate_study import GRIDS, KINDS, Rule, digits, letters, train, tuned

from evenstep.core.sync.rate import RATES, commit_step, look_ahead

SLOWDOWN, SEEDS = 4.0, 5
EQUAL = {f"{count} groups": [16 // count] * count for count in (2, 4, 8, 16)}
CASES = {"15 + the slow one": [15, 1], **EQUAL}
"""Members of each group; the last one has the slow worker. The first are the groups of `groups=progressive`."""
CHOSEN = "15 + the slow one"
OPTIMIZERS = ("SGD", "SGD momentum 0.9", "Adam")
LARGEST_LOSS = "<= 1"


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options = record.arguments(__doc__).parse_args()
    seeds = [options.seed + number for number in range(1 if options.quick else SEEDS)]
    language, fingerprint = letters()
    rows = [row for task in ((digits(),) if options.quick else (digits(), language)) for row in _study(task, seeds)]
    done = record.publish(
        "group_rates",
        "Rules for the rate of a group's commit: test accuracy at equal global samples, one worker of 16 4x slower",
        options,
        config={
            "groups": CASES, "slowdown": SLOWDOWN, "rules": RATES, "seeds": seeds,
            "optimizers": {kind: KINDS[kind] for kind in OPTIMIZERS},
            "grids": {kind: GRIDS[kind] for kind in OPTIMIZERS},
            "digits": {"hidden": 32, "global_batch_size": 128, "epochs": 10},
            "letters": {"hidden": 24, "global_batch_size": 256, "epochs": 2, "text_sha256": fingerprint},
        },
        figures=_figures(rows),
        tables=_tables(rows),
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _study(task, seeds):
    """A row for each optimizer, rate (the tuned one and twice it), groups and rule; a whole barrier has no rule."""
    rows = []
    for kind in OPTIMIZERS:
        began = time.monotonic()
        best, by_rate = tuned(task, kind, seeds)
        names = list(itertools.product((0, 1), RATES))
        runs = [(_rule(name), {**KINDS[kind], "lr": best[at]}) for at, name in names]
        for at, rate in enumerate(best):
            rows.append(_row(task, kind, rate, at, "1 group", "", by_rate[rate], 0.0))
        for case, members in CASES.items():
            seconds = [1.0] * (len(members) - 1) + [SLOWDOWN]
            speeds = [count / each for count, each in zip(members, seconds, strict=True)]
            accuracies, staleness = train(task, runs, speeds, seeds, parts=members)
            for (at, name), column in zip(names, zip(*accuracies, strict=True), strict=True):
                rows.append(_row(task, kind, best[at], at, case, name, column, staleness))
        record.console.print(f"  {task.name}, {kind}: {time.monotonic() - began:.0f} s")
    return rows


def _rule(name):
    return Rule(
        lambda given, share, batches, versions: commit_step(
            given, share=share, behind=batches, commits=versions, rule=name
        ),
        lambda given, commits: look_ahead(given, commits, rule=name),
    )


def _row(task, kind, rate, at, case, name, accuracies, staleness):
    return {"task": task.name, "kind": kind, "rate": rate, "at": at, "groups": case, "rule": name,
            "accuracies": list(accuracies), "mean_staleness": staleness}  # fmt: skip


# What is shown.


def _of(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _lost(rows, row):
    """Points lost against one group, on the mean of the seeds."""
    (whole,) = _of(rows, task=row["task"], kind=row["kind"], at=row["at"], groups="1 group")
    return 100 * (mean(whole["accuracies"]) - mean(row["accuracies"]))


def _figures(rows):
    figures = []
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in rows):
        for name in RATES:
            tuned_rows = _of(rows, task=task, kind=kind, at=0, rule=name)
            figures.append(
                record.figure(f"{task}, {kind}: points lost, {name}", [_lost(rows, row) for row in tuned_rows])
            )
        (chosen,) = _of(rows, task=task, kind=kind, at=0, rule=RATES[0], groups=CHOSEN)
        figures.append(
            record.figure(
                f"{task}, {kind}: points lost by progressive groups", [_lost(rows, chosen)], goal=LARGEST_LOSS
            )
        )
    return figures


def _tables(rows):
    tables = []
    for task, kind, at in dict.fromkeys((row["task"], row["kind"], row["at"]) for row in rows):
        whole, *_ = here = _of(rows, task=task, kind=kind, at=at)
        lines = [["one group", *[_told(whole)] * len(CASES)]]
        lines += [[name, *(_told(*_of(here, rule=name, groups=case)) for case in CASES)] for name in RATES]
        staleness = [f"{_of(here, rule=RATES[0], groups=case)[0]['mean_staleness']:.2f}" for case in CASES]
        lines.append(["mean staleness, global batches", *staleness])
        which = "tuned for one group" if at == 0 else "twice the tuned one"
        tables.append(
            record.table(f"{task}, {kind}, learning rate {whole['rate']:g} ({which})", ("rule", *CASES), lines)
        )
    return tables


def _told(row):
    values = [100 * value for value in row["accuracies"]]
    return f"{mean(values):.1f} +- {pstdev(values):.1f}"


if __name__ == "__main__":
    sys.exit(main())

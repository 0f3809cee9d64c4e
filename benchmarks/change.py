"""A worker becomes three times slower in mid-run, and fast again: how soon the sizes follow.

The sizes of an iteration are decided before it from what was observed until then. An iteration counts as right where
every worker's size is within 5 % of the new optimum, or within one sample of it where 5 % are less than that.
"""

import sys
import tempfile

from harness import clusters, record, segments

from evenstep.cluster.slowness import From

SPEEDS, BATCH, SECONDS = (1, 1, 1, 1), 256, 0.2
WHO, FACTOR = 3, 3.0
NEAR, WHOLE = 0.05, 1


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    slow, fast, end = (20, 45, 65)
    if options.quick:
        options.repetitions, slow, fast, end = 1, 10, 25, 40
    curves = clusters.proportional(SPEEDS, BATCH, SECONDS)
    _, even = clusters.best(curves, BATCH)
    _, uneven = clusters.best(curves, BATCH, [FACTOR if worker == WHO else 1.0 for worker in range(len(SPEEDS))])
    with tempfile.TemporaryDirectory() as run_dir:
        plan = segments.Plan(
            cluster=clusters.cluster_of(curves, [(WHO, From(factor=FACTOR, first=slow, until=fast))]),
            global_batch_size=BATCH,
            variants=(segments.Variant(name="lb-bsp", scheme="lb-bsp", iterations=end),),
            repetitions=options.repetitions,
            seed=options.seed,
            num_workers=2,
            run_dir=run_dir,
        )
        raw = segments.run(plan, record.console.print)
    plans = [segment["plans"] for segment in raw["lb-bsp"]]
    done = record.publish(
        "change",
        f"{len(SPEEDS)} workers, one {FACTOR:g}x slower from iteration {slow} to {fast}, num_workers=2",
        options,
        config={
            "speeds": SPEEDS,
            "global_batch_size": BATCH,
            "ideal_seconds": SECONDS,
            "slow_worker": WHO,
            "factor": FACTOR,
            "slow_from": slow,
            "fast_again_from": fast,
            "iterations": end,
            "sizes_while_fast": even,
            "sizes_while_slow": uneven,
            "tolerance": {"relative": NEAR, "samples": WHOLE},
            "num_workers": 2,
            "repetitions": options.repetitions,
        },
        figures=[
            record.figure(
                "iterations after the first slow one until the sizes are right and stay so",
                [_lag(plan, slow, fast, uneven) for plan in plans],
                goal="<= 3",
            ),
            record.figure(
                "iterations after the first fast one until the sizes are right and stay so",
                [_lag(plan, fast, end, even) for plan in plans],
                goal="<= 3",
            ),
            record.figure("changes of size in a run", [len(plan) - 1 for plan in plans]),
        ],
        raw=raw,
        overrun=record.overruns(raw),
    )
    return 0 if done else 1


def _lag(plan, first, end, wanted):
    """From iteration `first` to the first with the wanted sizes from which on, up to `end`, all have them."""
    changes, sizes, last_wrong = dict(plan), None, first - 1
    for iteration in range(end):
        sizes = changes.get(iteration, sizes)
        if iteration >= first and not _right(sizes, wanted):
            last_wrong = iteration
    return last_wrong + 1 - first


def _right(sizes, wanted):
    return all(abs(size - goal) <= max(NEAR * goal, WHOLE) for size, goal in zip(sizes, wanted, strict=True))


if __name__ == "__main__":
    sys.exit(main())

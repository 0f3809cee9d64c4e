"""What one slow worker of 16 costs, by the number of groups: simulated in every case, trained for real in some.

The slow worker takes 100 to 400 % longer (300 %: four times as long), by a lasting slowdown that no size evens out:
all sizes are equal. Time over the time without delay is the ratio of samples/s, which are counted in a window.
"""

import sys
import time

from harness import clusters, record, served
from harness.replay import replay
from harness.track import pace

from evenstep.cluster.slowness import Constant
from evenstep.core.groups.form import by_rank, rate_of
from evenstep.schemes import parse_scheme

WORKERS, SLOW, SIZE, SECONDS = 16, 5, 8, 1.0
"""Of 16 workers the one that is slow; samples and seconds of an undisturbed worker's iteration."""
DELAYS = (0, 100, 200, 300, 400)
"""Per cent."""
COUNTS = (1, 2, 4, 8, 16)
PROGRESSIVE = "progressive"
TRAINED = [(delay, count) for delay in (100, 300) for count in (1, 2, 4, 16)] + [(300, PROGRESSIVE), (400, PROGRESSIVE)]
"""Beside the one without delay."""
FIRST, WINDOW = {True: 36.0, False: 6.0}, 36.0
"""Undisturbed iterations before the window, in which progressive groups find the straggler, and of the window."""
SAME, LARGEST = "<= 0.03", "<= 1.2"


def main():
    parser = record.arguments(__doc__)
    options = parser.parse_args()
    trained = [(0, 1), *(TRAINED[:2] if options.quick else TRAINED)]
    cells = [(delay, count) for delay in DELAYS for count in (*COUNTS, PROGRESSIVE)]
    simulated = {cell: _simulated(*cell) for cell in cells}
    segments = [_segment(*cell) for cell in trained]
    record.console.print(f"  {len(segments)} segments, {sum(each.seconds for each in segments) / 60:.1f} minutes")
    began = time.monotonic()
    ran = served.run(segments, options.seed, record.console.print)
    record.console.print(f"  done in {(time.monotonic() - began) / 60:.1f} minutes")
    real = {cell: pace(one.tracks, *_window(cell[1])) for cell, one in zip(trained, ran, strict=True)}
    rows = [_row(cell, simulated, real) for cell in cells]
    of = {(row["delay"], row["groups"]): row for row in rows}
    done = record.publish(
        "stragglers",
        f"One slow worker of {WORKERS}, by groups",
        options,
        config={
            "workers": WORKERS, "slow_worker": SLOW, "samples_each": SIZE, "iteration_seconds": SECONDS,
            "delays_per_cent": DELAYS, "groups": [*COUNTS, PROGRESSIVE],
            "windows": {str(count): _window(count) for count in (*COUNTS, PROGRESSIVE)},
            "schemes": {str(count): _scheme(count) for count in (*COUNTS, PROGRESSIVE)},
        },
        figures=[
            record.figure(
                "simulated, off the closed form by",
                [abs(row["simulated"] / row["closed_form"] - 1) for row in rows if row["groups"] != PROGRESSIVE],
                goal="<= 0.001",
            ),
            record.figure(
                "trained, off the closed form by",
                [abs(row["trained"] / row["closed_form"] - 1) for row in rows if row["trained"] and row["delay"]],
                goal=SAME,
            ),
            *(
                record.figure(f"at {delay} % delay, progressive, {how}", [of[delay, PROGRESSIVE][how]], goal=LARGEST)
                for delay, how in ((300, "simulated"), (300, "trained"), (400, "trained"))
                if of[delay, PROGRESSIVE][how]
            ),
        ],
        tables=[_table(rows)],
        raw=rows,
        overrun=record.overruns(
            {
                _scheme(count): [{"overrun_iterations": one.overruns, "iterations": one.iterations}]
                for (_, count), one in zip(trained, ran, strict=True)
            }
        ),
    )  # fmt: skip
    return 0 if done else 1


def _scheme(count):
    return f"grouped:groups={count}" if count != PROGRESSIVE else "grouped"


def _cluster(delay):
    curves = clusters.proportional([1] * WORKERS, SIZE * WORKERS, SECONDS)
    return clusters.cluster_of(curves, [(SLOW, Constant(factor=1 + delay / 100))] if delay else [])


def _window(count):
    """From and to which second samples count."""
    first = FIRST[count == PROGRESSIVE]
    return first * SECONDS, (first + WINDOW) * SECONDS


def _segment(delay, count):
    return served.Segment(
        name=f"{delay} %, {count}",
        scheme=_scheme(count),
        cluster=_cluster(delay),
        global_batch_size=SIZE * WORKERS,
        seconds=_window(count)[1],
    )


def _simulated(delay, count):
    """Samples/s in virtual time, with communication that takes none."""
    window = _window(count)
    return pace(replay(parse_scheme(_scheme(count)), _cluster(delay), SIZE * WORKERS, window[1]), *window)


def _closed_form(delay, count):
    """N / sum over groups of n_j / s_j; of progressive groups, where the slow worker has one of its own."""
    slowdowns = [1 + delay / 100 if worker == SLOW else 1.0 for worker in range(WORKERS)]
    others = tuple(worker for worker in range(WORKERS) if worker != SLOW)
    progressive = ((*others, SLOW),) if not delay else (others, (SLOW,))
    groups = progressive if count == PROGRESSIVE else by_rank(range(WORKERS), count)
    return WORKERS / rate_of(groups, slowdowns)


def _row(cell, simulated, real):
    delay, count = cell
    return {
        "delay": delay,
        "groups": count,
        "closed_form": _closed_form(delay, count),
        "simulated": simulated[0, 1] / simulated[cell],
        "trained": real[0, 1] / real[cell] if cell in real else None,
    }


def _table(rows):
    return record.table(
        "time over the time without delay: closed form, simulated, trained",
        ("delay", *(str(count) for count in COUNTS), PROGRESSIVE),
        [[f"{delay} %", *(_told(row) for row in rows if row["delay"] == delay)] for delay in DELAYS],
    )


def _told(row):
    trained = "" if row["trained"] is None else f" {row['trained']:.3f}"
    return f"{row['closed_form']:.3f} {row['simulated']:.3f}{trained}"


if __name__ == "__main__":
    sys.exit(main())

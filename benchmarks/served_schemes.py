"""How far ahead: bsp, ssp, dssp and asp on a real server and emulated devices, beside what theory gives for each.

Equal workers, lasting slowness, episodes of it, and jitter; all sizes are equal, so that schemes differ only in who
waits for whom. Samples/s are taken in a window that begins when the bounds are used up, and ends before the epoch does.
"""

import itertools
import sys
import time
from dataclasses import dataclass

import numpy as np
from harness import clusters, record, served
from harness.replay import replay
from harness.track import pace, waiting_share

from evenstep.cluster.slowness import Episodic, Jitter
from evenstep.schemes import parse_scheme

BSP, SSP, DSSP, ASP = SCHEMES = ("bsp:engine=server", "ssp:bound=3", "dssp:lower=3,upper=15", "asp")
SPEEDS = (1, 1, 2, 4)
EPISODES = {"factor": 3.0, "period": 30, "shortest": 4, "longest": 12}
REGIMES = {
    "equal": "equal workers",
    "persistent": "speeds 1:1:2:4, lasting",
    "episodic": f"equal workers, each {EPISODES['factor']:g}x slower in episodes of {EPISODES['shortest']} to"
    f" {EPISODES['longest']} iterations, one in every {EPISODES['period']}",
    "jitter-10": "equal workers, jitter of 10 %",
    "jitter-30": "equal workers, jitter of 30 %",
}
SIZE = 8
"""Samples of every worker's iteration."""
ORDER_GOAL, CLOSED_GOAL, SPEEDS_GOAL = ">= 0.98", "<= 0.05", ">= 0.95"
FIRST = 3.0
"""Iterations before the window, where no bound has to be used up."""
USED_UP = 10.0
"""The same under persistent slowness, where a bound holds the fast ones back; they are counted from hold to hold."""
BURSTS = 80.0
"""Iterations of a window under persistent slowness with dssp, where a fast worker runs in bursts of up to 42."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The seconds of an iteration of equal workers, undisturbed, and how many of these a window has."""

    seconds: float
    window: float


CASES = {4: Case(seconds=0.2, window=50.0), 16: Case(seconds=0.5, window=24.0)}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--workers", type=int, choices=CASES, default=4)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args()
    case = CASES[options.workers]
    if options.quick:
        case = Case(seconds=case.seconds, window=8.0)
    plan = [
        (regime, scheme, repetition)
        for repetition in range(options.repetitions)
        for regime in options.regimes
        for scheme in (reversed(SCHEMES) if repetition % 2 else SCHEMES)
    ]
    segments = [_segment(options, case, *each) for each in plan]
    record.console.print(
        f"  {len(segments)} segments, {sum(each.seconds for each in segments) / 60:.1f} minutes and more"
    )
    began = time.monotonic()
    ran = served.run(segments, options.seed, record.console.print)
    record.console.print(f"  done in {(time.monotonic() - began) / 60:.1f} minutes")
    rows = {regime: {scheme: [] for scheme in SCHEMES} for regime in options.regimes}
    for (regime, scheme, _), segment, one in zip(plan, segments, ran, strict=True):
        rows[regime][scheme].append(_row(regime, scheme, case, segment, one))
    parts = [f"served_schemes-{options.workers}"]
    if options.regimes != list(REGIMES):
        parts += options.regimes
    done = record.publish(
        "-".join(parts),
        f"Schemes on a server, {options.workers} workers",
        options,
        config={
            "workers": options.workers,
            "regimes": {regime: REGIMES[regime] for regime in options.regimes},
            "schemes": SCHEMES,
            "global_batch_size": SIZE * options.workers,
            "iteration_seconds": case.seconds,
            "windows": {f"{regime}/{scheme}": _window(regime, scheme, case) for regime in rows for scheme in SCHEMES},
            "episodes": EPISODES,
            "seeds_of_disturbances": [options.seed + repetition for repetition in range(options.repetitions)],
            "closed_forms": CLOSED_FORMS,
        },
        figures=[each for regime in options.regimes for each in _figures(regime, rows[regime])],
        tables=[_table(regime, rows[regime]) for regime in options.regimes],
        raw={f"{regime}/{scheme}": each for regime, of_regime in rows.items() for scheme, each in of_regime.items()},
        overrun=_overruns(plan, ran),
    )
    return 0 if done else 1


# What runs.


def _segment(options, case, regime, scheme, repetition):
    _, stop = _window(regime, scheme, case)
    return served.Segment(
        name=f"{regime}/{scheme}",
        scheme=scheme,
        cluster=_cluster(regime, options.workers, case, options.seed + repetition),
        global_batch_size=SIZE * options.workers,
        seconds=stop,
    )


def _cluster(regime, workers, case, seed):
    """Workers the mean of whose speeds is that of an iteration's seconds."""
    speeds = [SPEEDS[worker % len(SPEEDS)] if regime == "persistent" else 1 for worker in range(workers)]
    disturbance = {
        "episodic": Episodic(**EPISODES, seed=seed),
        "jitter-10": Jitter(spread=0.1, seed=seed),
        "jitter-30": Jitter(spread=0.3, seed=seed),
    }.get(regime)
    disturbances = [] if disturbance is None else [(worker, disturbance) for worker in range(workers)]
    return clusters.cluster_of(clusters.proportional(speeds, SIZE * workers, case.seconds), disturbances)


def _window(regime, scheme, case):
    """From and to which second of a segment samples count."""
    bounded = _is_held(regime, scheme)
    start = USED_UP if bounded else FIRST
    length = max(case.window, BURSTS) if bounded and scheme == DSSP else case.window
    return start * case.seconds, (start + length) * case.seconds


def _is_held(regime, scheme):
    return regime == "persistent" and scheme in (SSP, DSSP)


def _overruns(plan, ran):
    by_scheme = {}
    for (_, scheme, _), one in zip(plan, ran, strict=True):
        by_scheme.setdefault(scheme, []).append({"overrun_iterations": one.overruns, "iterations": one.iterations})
    return record.overruns(by_scheme)


# What theory gives.

CLOSED_FORMS = {
    BSP: "X over the mean over iterations of the slowest worker's seconds",
    SSP: "workers x the slowest one's samples/s where that lasts; else a replay in virtual time",
    DSSP: "as ssp",
    ASP: "the sum of the workers' samples/s, each over the iterations that it did",
}
"""All from the very seconds that the workers were held for, with communication that takes no time."""


def _closed_form(regime, scheme, segment, tracks, window):
    """Samples/s; `tracks` say which iterations of each worker are in the window."""
    workers, batch = len(segment.cluster), segment.global_batch_size
    disturbance = segment.cluster.disturbance()

    def seconds(worker, iterations):
        return [
            disturbance.seconds(worker=worker, iteration=k, batch_size=SIZE, natural_seconds=0.0) for k in iterations
        ]

    if scheme == ASP:
        return sum(SIZE / np.mean(seconds(worker, track.between(*window))) for worker, track in enumerate(tracks))
    if scheme == BSP:
        iterations = tracks[0].between(*window)
        return batch / np.max([seconds(worker, iterations) for worker in range(workers)], axis=0).mean()
    if regime in ("equal", "persistent"):
        return batch / max(seconds(worker, [0])[0] for worker in range(workers))
    return _replayed(segment, window)[0]


def _replayed(segment, window, held=False):
    """Samples/s and waiting share in virtual time."""
    tracks = replay(parse_scheme(segment.scheme), segment.cluster, segment.global_batch_size, segment.seconds)
    return pace(tracks, *window, held=held), waiting_share(tracks, *window, held=held)


# What is shown.


def _row(regime, scheme, case, segment, ran):
    window, held = _window(regime, scheme, case), _is_held(regime, scheme)
    replayed, replayed_waiting = _replayed(segment, window, held)
    return {
        "samples_per_second": pace(ran.tracks, *window, held=held),
        "waiting_share": waiting_share(ran.tracks, *window, held=held),
        "closed_form": float(_closed_form(regime, scheme, segment, ran.tracks, window)),
        "replayed": replayed,
        "replayed_waiting_share": replayed_waiting,
        "iterations": [len(track.between(*window, held=held)) for track in ran.tracks],
        "overruns": ran.overruns,
    }


def _paces(rows, scheme, key="samples_per_second"):
    return [row[key] for row in rows[scheme]]


def _ratios(above, below):
    return [a / b for a, b in zip(above, below, strict=True)]


def _figures(regime, rows):
    figures = [
        record.figure(f"{regime}: {_short(scheme)} over {_short(before)}",
                      _ratios(_paces(rows, scheme), _paces(rows, before)), goal=ORDER_GOAL)
        for before, scheme in itertools.pairwise(SCHEMES)
    ]  # fmt: skip
    for scheme in SCHEMES:
        ratios = _ratios(_paces(rows, scheme), _paces(rows, scheme, "closed_form"))
        figures.append(
            record.figure(
                f"{regime}: {_short(scheme)}, off its closed form by",
                [abs(1 - each) for each in ratios],
                goal=CLOSED_GOAL,
            )
        )
        if scheme == ASP:
            figures.append(record.figure(f"{regime}: asp over the sum of the speeds", ratios, goal=SPEEDS_GOAL))
    return figures


def _table(regime, rows):
    headings = (
        "scheme",
        "samples/s",
        "over bsp",
        "over its closed form",
        "over its replay",
        "waiting",
        "in its replay",
    )
    return record.table(
        f"{regime} ({REGIMES[regime]}): medians of samples/s, and the share of the workers' time that was not compute",
        headings,
        [
            [
                scheme,
                f"{np.median(_paces(rows, scheme)):.1f}",
                f"{np.median(_ratios(_paces(rows, scheme), _paces(rows, BSP))):.3f}",
                f"{np.median(_ratios(_paces(rows, scheme), _paces(rows, scheme, 'closed_form'))):.3f}",
                f"{np.median(_ratios(_paces(rows, scheme), _paces(rows, scheme, 'replayed'))):.3f}",
                f"{np.median(_paces(rows, scheme, 'waiting_share')):.1%}",
                f"{np.median(_paces(rows, scheme, 'replayed_waiting_share')):.1%}",
            ]
            for scheme in rows
        ],
    )


def _short(scheme):
    return scheme.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())

"""Whether sizes settle and stay, and how soon they follow: lb-bsp's decisions replayed on recorded iterations.

No processes and no clock: estimators and policy alone, in virtual time, so that figures do not depend on the machine.
Jobs `a` are for tuning the decision, jobs `b` for judging it; synthetic cases have white noise, in iterations of 64 ms.
Two workers, of which the second is disturbed, or four.

* stay: no iteration of 300 has sizes more than 5 % of an equal share away from equal, where workers are equal.
* same end: sizes at the end are within 5 % of an equal share of the median of all runs, where a worker is slower for
  good.
* back: within 20 iterations of the end of a disturbance, sizes are within 5 % of equal, and 5 iterations later too.
* wrong leap: a decision more than halves or doubles a size although the iteration then takes longer, noise aside.
* wrong shape: at the end, the estimated time at half the size, relative to the time at the present size, is off by
  more than 20 %.
* follows: at most 3 iterations from the first slow one until two thirds of the possible gain are had.
* cost: the time of all iterations, noise aside, over that with the best sizes of every iteration.
* over equal sizes: the time of all iterations as recorded, noise included, over that with equal sizes. Below 1, the
  recorded loads differed for long enough that it was right to leave equal sizes.
"""

import sys
from statistics import median

import numpy as np
from harness import record
from harness.replays import Line, Recording, replay

from evenstep.core.load import Predicted

LEVELS = ("3ms", "10ms", "50ms", "300ms")
ITERATIONS, SLACK = 300, 0.05
BEGIN, END, TURN_BACK = 60, 120, 20
NEVER, FOLLOWED = ITERATIONS, 3
KINDS = ("a", "b", "white")
FLAT = Line(1000.0, 0.0)
WHITE = {"no fixed part": Line(0.0, 2000.0), "half fixed": Line(32_000.0, 1000.0)}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="of each case")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--cases", action="store_true", help="show the figures of every case too")
    options = parser.parse_args()
    if options.quick:
        options.runs = 2
    raw = {kind: _synthetic(options.seed, options.runs) if kind == "white" else _recorded(kind, options.runs)
           for kind in options.kinds}  # fmt: skip
    figures = [
        record.figure(f"{kind}: {point}", **_figure(point, [value for runs in cases.values() for value in runs]))
        for kind, points in raw.items()
        for point, cases in points.items()
    ]
    rows = [
        [f"{kind}, {case}: {point}", _shown(point, runs)]
        for kind, points in raw.items()
        for point, cases in points.items()
        for case, runs in cases.items()
    ]
    tables = [record.table("By case", ("case", "runs that meet it, or the figure"), rows)] if options.cases else []
    done = record.publish(
        "settle",
        "Sizes that settle, stay and follow, in virtual time",
        options,
        config={"runs": options.runs, "iterations": ITERATIONS, "slack": SLACK},
        figures=figures,
        raw=raw,
        tables=tables,
    )
    return 0 if done else 1


def _figure(point, values):
    """The values, and the goal: of what a run meets or not, the share of the runs."""
    if point.startswith("cost"):
        return {"values": values}
    if point.startswith("follows"):
        values = [value <= FOLLOWED for value in values]
    return {"values": [sum(values) / len(values)], "goal": ">= 0.9" if point == "same end" else ">= 1"}


def _shown(point, runs):
    if point.startswith("cost"):
        return f"median {median(runs):.3f}, most {max(runs):.3f}"
    if point.startswith("follows"):
        return f"median {median(runs):g}, most {max(runs)}"
    return f"{sum(runs)} of {len(runs)}"


def _recorded(job, count):
    """By point and case, a value for each run."""
    points = {}
    for level in LEVELS:
        for condition in ("free", "busy"):
            if f"{level}-{job}-{condition}" == "300ms-b-busy":  # Never recorded.
                continue
            recording = Recording(f"{level}-{job}-{condition}")
            runs = [_run(recording, loads) for loads in recording.windows(count, ITERATIONS)]
            beside = "" if condition == "free" else " on a busy machine"
            _note(points, f"stay{beside}", level, [_stays(run) for run in runs])
            _note(points, f"cost, equal workers{beside}", level, [_cost(run) for run in runs])
            _note(points, f"cost, equal workers{beside}, over equal sizes", level, [_over_equal(run) for run in runs])
            _sane(points, level, runs)
        recording = Recording(f"{level}-{job}-free")
        for factor in (3, 4):
            slowdown = np.ones((ITERATIONS, 2))
            slowdown[:, 1] = factor
            runs = [_run(recording, loads, slowdown) for loads in recording.windows(count, ITERATIONS)]
            _note(points, "same end", f"{level}, {factor}x", _same_end(runs))
            _note(points, "cost, persistent", f"{level}, {factor}x", [_cost(run) for run in runs])
        for factor in (2, 4):
            slowdown = np.ones((ITERATIONS, 2))
            slowdown[BEGIN:END, 1] = factor
            runs = [_run(recording, loads, slowdown) for loads in recording.windows(count, ITERATIONS)]
            _disturbed(points, f"{level}, {factor}x", runs)
    recording = Recording(f"1ms-{job}-free")
    runs = [
        replay(Predicted(), FLAT, recording.share, loads, np.ones_like(loads))
        for loads in recording.windows(count, ITERATIONS)
    ]
    _note(points, "stay, all sizes take equally long", "1ms", [_stays(run) for run in runs])
    return points


def _synthetic(seed, count):
    points = {}
    for shape, line in WHITE.items():
        for level in (0.02, 0.05, 0.15):
            for workers in (2, 4):
                case = f"{workers} workers, {shape}, {level:.0%}"
                drawn = [_noise(level, seed + k, workers) for k in range(count)]
                ones = np.ones((ITERATIONS, workers))
                runs = [replay(Predicted(), line, 32, loads, ones) for loads in drawn]
                _note(points, "stay", case, [_stays(run) for run in runs])
                _sane(points, case, runs)
                slowdown = ones.copy()
                slowdown[:, -1] = 4.0
                runs = [replay(Predicted(), line, 32, loads, slowdown) for loads in drawn]
                _note(points, "same end", f"{case}, 4x", _same_end(runs))
                _note(points, "cost, persistent", f"{case}, 4x", [_cost(run) for run in runs])
                for factor in (2, 3):
                    slowdown = ones.copy()
                    slowdown[BEGIN:END, -1] = factor
                    runs = [replay(Predicted(), line, 32, loads, slowdown) for loads in drawn]
                    _disturbed(points, f"{case}, {factor}x", runs)
    return points


def _disturbed(points, case, runs):
    _note(points, "follows", case, [_follows(run) for run in runs])
    _note(points, "back", case, [_back(run) for run in runs])
    _note(points, "cost, disturbed", case, [_cost(run) for run in runs])
    _sane(points, case, runs)


def _sane(points, case, runs):
    _note(points, "no wrong leap", case, [not _wrong_leaps(run) for run in runs])
    _note(points, "no wrong shape", case, [not _wrong_shape(run) for run in runs])


def _note(points, point, case, values):
    points.setdefault(point, {}).setdefault(case, []).extend(values)


def _run(recording, loads, slowdown=None):
    slowdown = np.ones_like(loads) if slowdown is None else slowdown
    return replay(Predicted(), recording.line, recording.share, loads, slowdown)


def _noise(level, seed, workers):
    return np.exp(np.random.default_rng(seed).normal(-(level**2) / 2, level, size=(ITERATIONS, workers)))


def _near(sizes, others, share):
    return (np.abs(sizes - others) <= SLACK * share + 1e-9).all(axis=-1)


def _stays(run):
    return bool(_near(run.sizes, run.sizes[0], run.sizes[0].mean()).all())


def _same_end(runs):
    ends = np.array([run.sizes[-1] for run in runs])
    return [bool(near) for near in _near(ends, np.median(ends, axis=0), ends.sum(axis=1).mean() / ends.shape[1])]


def _back(run):
    share = run.sizes[0].mean()
    near = _near(run.sizes, share, share)
    return bool(any(near[k] and near[k + 5] for k in range(END, END + TURN_BACK + 1)))


def _follows(run):
    """From the first slow iteration."""
    makespan, share = run.makespan(run.sizes), run.sizes[0].mean()
    equal = float(run.makespan(np.full_like(run.sizes, int(share)))[BEGIN])
    best = _best(run)[BEGIN]
    wanted = equal - 2 / 3 * (equal - best)
    return next((k - BEGIN for k in range(BEGIN, END) if makespan[k] <= wanted), NEVER)


def _best(run):
    """The shortest time of every iteration, in shares of samples as small as one likes, each worker keeping two."""
    fixed, slope = run.line
    total, least = run.sizes[0].sum(), min(2, run.sizes[0].mean())
    found = []
    for slowdown in run.slowdown:
        low, high = 0.0, float((slowdown * (fixed + slope * total)).max())
        for _ in range(60):
            time = (low + high) / 2
            fits = np.clip((time / slowdown - fixed) / slope, least, None).sum() >= total if slope else True
            low, high = (low, time) if fits else (time, high)
        found.append(max(high, float((slowdown * (fixed + slope * least)).max())))
    return np.array(found)


def _cost(run):
    return float(run.makespan(run.sizes).sum() / _best(run).sum())


def _over_equal(run):
    line, share = run.line, run.sizes[0]
    equal = run.microseconds / line.microseconds(run.sizes) * line.microseconds(share)
    return float(run.microseconds.max(axis=1).sum() / equal.max(axis=1).sum())


def _wrong_leaps(run):
    leaps = 0
    for k in range(1, ITERATIONS):
        ratio = run.sizes[k] / run.sizes[k - 1]
        if ratio.max() > 2.0 or ratio.min() < 0.5:
            now, then = ((run.slowdown[k] * run.line.microseconds(run.sizes[at])).max() for at in (k, k - 1))
            leaps += bool(now > 1.01 * then)
    return leaps


def _wrong_shape(run):
    line, sizes, fixed = run.line, run.sizes[-1], run.fixed_samples[-1]
    if not fixed.any():
        return False
    truth = line.microseconds(sizes / 2) / line.microseconds(sizes)
    said = (fixed + sizes / 2) / (fixed + sizes)
    return bool((np.abs(said / truth - 1.0) > 0.2).any())


if __name__ == "__main__":
    sys.exit(main())

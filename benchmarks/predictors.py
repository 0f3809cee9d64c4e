"""How well each predictor says the next iteration's speed, on made-up traces and on recorded ones, and at what cost.

A predictor is asked before each iteration, with the factors known before it, and then told what it took. The figure is
the root mean square error of the speed over the mean speed, without the first iterations, in which some have to learn.
Recorded traces are the files in `traces/`.
"""

import json
import math
import sys
import time
import zlib
from pathlib import Path
from statistics import median

import numpy as np
from baselines import BASELINES
from harness import record
from harness.speeds import ITERATIONS, LEADING, OTHER, Trace

from evenstep.core.load.narx import Narx
from evenstep.core.values import Factors, Sample

SKIPPED, SEEDS = 100, 5
LEADING_GOAL, OTHER_GOAL, MILLISECONDS_GOAL = 0.8, 1.02, 1.0
TRACES = Path(__file__).parent / "traces"
ORDER = (*BASELINES, "narx")


def main():
    options = record.arguments(__doc__).parse_args()
    seeds = 2 if options.quick else SEEDS
    raw, ratios = {}, {}
    for kind, traces in (("leading", LEADING), ("other", OTHER), ("recorded", _recorded(options.quick))):
        for name, make in traces.items():
            record.console.print(f"  {kind}: {name}")
            each = [make] if kind == "recorded" else [_drawn(name, make, options.seed + seed) for seed in range(seeds)]
            raw[name] = {"kind": kind, "predictors": {row: [_run(row, trace) for trace in each] for row in ORDER}}
            ratios.setdefault(kind, {})[name] = _against_ema(raw[name], "rmse")
    done = record.publish(
        "predictors",
        "One-step error of the predictors of speed",
        options,
        config={"iterations": ITERATIONS, "skipped": SKIPPED, "seeds": seeds},
        figures=_figures(raw, ratios),
        raw=raw,
        tables=[_table(raw)],
    )
    return 0 if done else 1


def _drawn(name, make, seed):
    return make(np.random.default_rng([seed, zlib.crc32(name.encode())]))


def _recorded(quick):
    """The traces in the files, by worker."""
    found = {}
    for path in [] if quick else sorted(TRACES.glob("*.json")):
        for number, worker in enumerate(json.loads(path.read_text(encoding="utf-8"))["workers"]):
            columns = [worker[key] for key in ("samples", "compute_seconds", "cpu_availability", "memory_availability")]
            trace = Trace(*(np.array(column, dtype=np.float64) for column in columns))
            known = (trace.samples > 0) & (trace.seconds > 0)
            found[f"{path.stem}, worker {number}"] = Trace(*(column[known] for column in trace))
    return found


def _run(name, trace):
    """Errors of one predictor on one trace, and its time."""
    predictor = WithFactors() if name == "narx" else BASELINES[name]()
    speeds = trace.samples / trace.seconds
    missed, took = np.full(len(speeds), np.nan), []
    for k, (samples, seconds, cpu, memory) in enumerate(zip(*trace, strict=True)):
        known = (Factors(cpu_availability=float(cpu), memory_availability=float(memory)),) if name == "narx" else ()
        log = math.log(float(seconds) / float(samples))
        began = time.perf_counter()
        forecast = predictor.forecast(*known)
        predictor.observe(log, *known)
        took.append(time.perf_counter() - began)
        if forecast is not None:
            missed[k] = math.exp(-forecast) - speeds[k]

    def rmse(skipped):
        return float(np.sqrt(np.nanmean(missed[skipped:] ** 2)) / speeds[skipped:].mean())

    return {
        "rmse": rmse(min(SKIPPED, len(speeds) // 3)),
        "rmse_from_the_start": rmse(1),
        "milliseconds": 1000.0 * median(took),
    }


class WithFactors:
    """NARX with the interface of the others, and the factors known before an iteration."""

    def __init__(self):
        self._narx = Narx()

    def observe(self, log, factors):
        self._narx.observe(Sample(samples=1.0, compute_seconds=math.exp(log)), factors)

    def forecast(self, factors):
        nanoseconds = self._narx.forecast(factors)
        return math.log(nanoseconds * 1e-9) if nanoseconds else None


def _against_ema(trace, key):
    runs = trace["predictors"]
    return [one[key] / other[key] for one, other in zip(runs["narx"], runs["ema"], strict=True)]


def _figures(raw, ratios):
    goals = {"leading": f"<= {LEADING_GOAL}", "other": f"<= {OTHER_GOAL}", "recorded": None}
    figures = [
        record.figure(f"NARX / EMA, {name}", values, goal=goals[kind])
        for kind, traces in ratios.items()
        for name, values in traces.items()
    ]
    for kind, says in (("leading", "where a factor leads"), ("other", "where none does")):
        for key, start in (("rmse", "without"), ("rmse_from_the_start", "with")):
            worst = max(max(_against_ema(trace, key)) for trace in raw.values() if trace["kind"] == kind)
            name = f"NARX / EMA {says}, worst trace and seed, {start} the first {SKIPPED}"
            figures.append(record.figure(name, [worst], goal=goals[kind]))
    for name in ORDER:
        took = [run["milliseconds"] for trace in raw.values() for run in trace["predictors"][name]]
        goal = f"<= {MILLISECONDS_GOAL}" if name == "narx" else None
        figures.append(record.figure(f"{name}: to predict and observe once", took, goal=goal, unit="ms"))
    return figures


def _table(raw):
    rows = [
        [name, *(f"{100.0 * median(run['rmse'] for run in trace['predictors'][row]):.1f}" for row in ORDER)]
        for name, trace in raw.items()
    ]
    return record.table("Root mean square error of the speed, per cent of the mean speed", ("trace", *ORDER), rows)


if __name__ == "__main__":
    sys.exit(main())

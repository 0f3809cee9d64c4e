"""The load schemes beside oracles that know the speeds, where slowness is lasting, episodic, or new in every iteration.

Real training on emulated devices, or with --virtual the same policies in virtual time, over many more
iterations and without communication.
"""

import itertools
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import numpy as np
from harness import clusters, oracle, record, segments, virtual

from evenstep.cluster.slowness import Episodic, Jitter
from evenstep.core.errors import ConfigError
from evenstep.core.load.equal import EqualPolicy
from evenstep.schemes import parse_scheme

SPEEDS = (1, 1, 2, 4)
EPISODES = {"factor": 3.0, "period": 300, "shortest": 10, "longest": 200}
EPOCH = 20
"""Iterations of an epoch; the first epoch, in which all of them learn, is left out of the figures."""
LATE = 2
VIRTUAL_ITERATIONS, VIRTUAL_SEEDS = 2000, 5

REGIMES = {
    "persistent": "speeds 1:1:2:4, lasting",
    "episodic": f"equal workers, each {EPISODES['factor']:g}x slower in episodes of {EPISODES['shortest']} to"
    f" {EPISODES['longest']} iterations, one in every {EPISODES['period']}",
    "jitter-10": "equal workers, jitter of 10 %",
    "jitter-30": "equal workers, jitter of 30 %",
}
GOALS = {
    "persistent": ("oracle", ">= 0.96"),
    "episodic": ("late oracle", ">= 0.95"),
    "jitter-10": ("equal", ">= 0.99"),
    "jitter-30": ("equal", ">= 0.99"),
}
"""For the default lb-bsp: samples/s over whose."""

EQUAL, ORACLE, LATE_ORACLE, DEFAULT = "equal", "oracle", "late oracle", "lb-bsp"
REFERENCES = (EQUAL, ORACLE, LATE_ORACLE)
PREDICTORS = tuple(f"lb-bsp:predictor={name}" for name in ("last", "ema", "narx"))
OTHERS = {
    4: (*PREDICTORS, "lb-bsp:exchange=blocking", "lb-bsp:tuner=solver", "lb-bsp:tuner=pairwise", "dbs"),
    16: ("lb-bsp:predictor=ema", "lb-bsp:predictor=narx", "lb-bsp:tuner=pairwise", "dbs"),
}
SAME_IN_VIRTUAL_TIME = ("lb-bsp:exchange=blocking",)
"""What differs only in when it communicates, which takes no time there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How long a real run is: iterations by regime, and how often the references and lb-bsp, and the rest, run."""

    global_batch_size: int
    ideal_seconds: float
    iterations: dict[str, int]
    repetitions: dict[str, int]


CASES = {
    4: Case(
        global_batch_size=256,
        ideal_seconds=0.08,
        iterations={"persistent": 60, "episodic": 160, "jitter-10": 60, "jitter-30": 60},
        repetitions={"persistent": 3, "episodic": 2, "jitter-10": 3, "jitter-30": 3},
    ),
    16: Case(
        global_batch_size=512,
        ideal_seconds=0.3,
        iterations={"persistent": 40, "episodic": 60, "jitter-10": 40, "jitter-30": 40},
        repetitions={"persistent": 2, "episodic": 1, "jitter-10": 2, "jitter-30": 2},
    ),
}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--workers", type=int, choices=CASES, default=4)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--virtual", action="store_true", help="in virtual time")
    options = parser.parse_args()
    case = CASES[options.workers]
    parts = [f"load_schemes-{options.workers}", *(["virtual"] if options.virtual else [])]
    if options.regimes != list(REGIMES):
        parts += options.regimes
    schemes = [*REFERENCES, DEFAULT, *_known(OTHERS[options.workers], options.workers, options.virtual)]
    measured = (_in_virtual_time if options.virtual else _for_real)(options, case, schemes)
    done = record.publish(
        "-".join(parts),
        f"Load schemes, {options.workers} workers" + (", IN VIRTUAL TIME" if options.virtual else ""),
        options,
        figures=[each for regime in options.regimes for each in _figures(regime, measured.rows[regime])],
        tables=[_table(regime, measured.rows[regime]) for regime in options.regimes],
        config={
            "workers": options.workers,
            "regimes": {regime: REGIMES[regime] for regime in options.regimes},
            "speeds_in_persistent": SPEEDS,
            "episodes": {**EPISODES, "share_of_iterations": _duty()},
            "global_batch_size": case.global_batch_size,
            "ideal_seconds": case.ideal_seconds,
            "epoch_iterations": EPOCH,
            "warmup": EPOCH,
            "late_oracle_iterations": LATE,
            **measured.config,
        },
        raw=measured.raw,
        overrun=measured.overrun,
    )
    return 0 if done else 1


def _known(names, workers, in_virtual_time):
    """Those that this version can make; says why it leaves others out."""
    known = []
    for name in names:
        if in_virtual_time and name in SAME_IN_VIRTUAL_TIME:
            record.console.print(f"  left out: {name}, which is the same as {DEFAULT} in virtual time")
            continue
        try:
            policy = parse_scheme(name).load.policy(workers)
        except ConfigError as error:
            record.console.print(f"  left out: {name}: {error}")
            continue
        if isinstance(policy, EqualPolicy):
            # Equal sizes must not stand in the tables under another name.
            record.console.print(f"  left out: {name}: its sizes are always equal, so it has not been built yet")
            continue
        known.append(name)
    return known


def _duty():
    return (EPISODES["shortest"] + EPISODES["longest"]) / (2 * EPISODES["period"])


def _cluster(regime, workers, case, seed):
    """Workers that together take the ideal time for the batch where nothing disturbs them."""
    speeds = [SPEEDS[worker % len(SPEEDS)] if regime == "persistent" else 1 for worker in range(workers)]
    disturbance = {
        "episodic": Episodic(**EPISODES, seed=seed),
        "jitter-10": Jitter(spread=0.1, seed=seed),
        "jitter-30": Jitter(spread=0.3, seed=seed),
    }.get(regime)
    disturbances = [] if disturbance is None else [(worker, disturbance) for worker in range(workers)]
    return clusters.cluster_of(clusters.proportional(speeds, case.global_batch_size, case.ideal_seconds), disturbances)


def _scheme(name, cluster, case, iterations):
    if name == EQUAL:
        return parse_scheme("bsp")
    if name == ORACLE:
        return oracle.oracle(cluster, case.global_batch_size, iterations)
    if name == LATE_ORACLE:
        return oracle.oracle(cluster, case.global_batch_size, iterations, late=LATE)
    return parse_scheme(name)


# What was measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One repetition of one scheme: figures of its settled iterations."""

    repetition: int
    samples_per_second: float
    waiting_share: float
    changes_per_100: float
    """Iterations whose sizes are not those of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The rows as `{regime: {scheme: [row, ...]}}`, and what else belongs into the record."""

    rows: dict
    raw: dict
    config: dict
    overrun: dict | None = None


def _row(repetition, samples_per_second, seconds, sizes):
    """From emulated compute seconds and sizes, both of shape [iterations, workers], of the settled iterations."""
    return Row(
        repetition=repetition,
        samples_per_second=samples_per_second,
        waiting_share=1.0 - float(seconds.mean(axis=1).sum() / seconds.max(axis=1).sum()),
        changes_per_100=100.0 * float((np.diff(sizes, axis=0) != 0).any(axis=1).mean()),
    )


def _for_real(options, case, schemes):
    repetitions = 1 if options.quick else max(case.repetitions[regime] for regime in options.regimes)
    variants, about = [], {}
    for repetition, regime in itertools.product(range(repetitions), options.regimes):
        if repetition >= case.repetitions[regime]:
            continue
        iterations = 2 * EPOCH if options.quick else case.iterations[regime]
        cluster = _cluster(regime, options.workers, case, options.seed + repetition)
        for name in schemes if repetition == 0 else schemes[: len(REFERENCES) + 1]:
            variant = segments.Variant(
                name=f"{regime}/{name}",
                scheme=_scheme(name, cluster, case, iterations),
                iterations=iterations,
                warmup=EPOCH,
                epoch_iterations=EPOCH,
                cluster=cluster,
                only=(repetition,),
            )
            variants.append(variant)
            about[variant.name, repetition] = cluster
    plan = segments.Plan(
        cluster=variants[0].cluster,
        global_batch_size=case.global_batch_size,
        variants=tuple(variants),
        repetitions=repetitions,
        seed=options.seed,
        alternate=True,
    )
    began = time.monotonic()
    raw = segments.run(plan, record.console.print)
    record.console.print(f"  {len(variants)} segments in {(time.monotonic() - began) / 60:.1f} minutes")
    # Over all regimes, since one overrun alone is more than 2 % of a single short segment.
    by_scheme = defaultdict(list)
    for variant, of_variant in raw.items():
        by_scheme[variant.split("/", 1)[1]] += of_variant
    overrun = record.overruns(by_scheme)
    rows = {regime: {} for regime in options.regimes}
    for variant, of_variant in raw.items():
        regime, name = variant.split("/", 1)
        rows[regime][name] = [
            _real_row(repetition, segment, about[variant, repetition]) for repetition, segment in enumerate(of_variant)
        ]
    return Measured(
        rows=rows,
        raw={variant: [_compact(segment) for segment in of_variant] for variant, of_variant in raw.items()},
        config={
            "iterations": {variant.name: variant.iterations for variant in variants},
            "seeds_of_disturbances": [options.seed + repetition for repetition in range(repetitions)],
        },
        overrun=overrun,
    )


def _real_row(repetition, segment, cluster):
    sizes = segments.sizes_of(segment)
    seconds = clusters.emulated_seconds(cluster, sizes)
    return _row(repetition, segment["settled_samples_per_second"], seconds[EPOCH:], np.array(sizes)[EPOCH:])


def _compact(segment):
    """The segment with its long lists as text, so that the record stays readable."""
    return {
        **segment,
        "iteration_seconds": " ".join(f"{seconds:.4f}" for seconds in segment["iteration_seconds"]),
        "sizes": [f"{iteration}: {'/'.join(map(str, sizes))}" for iteration, sizes in segment["sizes"]],
    }


def _in_virtual_time(options, case, schemes):
    seeds, iterations = (1, 4 * EPOCH) if options.quick else (VIRTUAL_SEEDS, VIRTUAL_ITERATIONS)
    jobs = [
        (regime, name, repetition)
        for regime in options.regimes
        # Nothing is drawn there, so one run is as good as many.
        for repetition in range(1 if regime == "persistent" else seeds)
        for name in schemes
    ]
    rows = {regime: {name: [] for name in schemes} for regime in options.regimes}
    context = get_context("forkserver")
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1), mp_context=context) as pool:
        arguments = ((*job, options.workers, iterations, options.seed) for job in jobs)
        for (regime, name, repetition), (row, seconds) in zip(jobs, pool.map(_virtual_row, arguments), strict=True):
            rows[regime][name].append(row)
            record.console.print(f"  {regime} {repetition + 1} {name}: {seconds:.1f} s")
    return Measured(
        rows=rows,
        raw={
            f"{regime}/{name}": [asdict(row) for row in of_scheme]
            for regime, by_scheme in rows.items()
            for name, of_scheme in by_scheme.items()
        },
        config={
            "iterations": iterations,
            "seeds_of_disturbances": [options.seed + repetition for repetition in range(seeds)],
            "communication": "takes no time",
        },
    )


def _virtual_row(job):
    regime, name, repetition, workers, iterations, seed = job
    began = time.monotonic()
    case = CASES[workers]
    cluster = _cluster(regime, workers, case, seed + repetition)
    load = _scheme(name, cluster, case, iterations).load
    sizes, seconds = virtual.train(load, cluster, case.global_batch_size, iterations, EPOCH)
    settled = seconds[EPOCH:]
    pace = len(settled) * case.global_batch_size / float(settled.max(axis=1).sum())
    return _row(repetition, pace, settled, sizes[EPOCH:]), time.monotonic() - began


# What is shown.


def _ratios(rows, name, reference):
    """Samples/s over the reference's, paired within a repetition."""
    paces = {row.repetition: row.samples_per_second for row in rows[reference]}
    return [row.samples_per_second / paces[row.repetition] for row in rows[name]]


def _figures(regime, rows):
    goal_over, goal = GOALS[regime]
    return [
        record.figure(
            f"{regime}: {DEFAULT} over {reference}",
            _ratios(rows, DEFAULT, reference),
            goal=goal if reference == goal_over else None,
        )
        for reference in REFERENCES
    ]


def _table(regime, rows):
    return record.table(
        f"{regime} ({REGIMES[regime]}): medians of samples/s over the references', and more",
        ("scheme", "repetitions", *(f"over {name}" for name in REFERENCES), "waiting share", "changes per 100"),
        [
            [
                name,
                str(len(of_scheme)),
                *(f"{np.median(_ratios(rows, name, reference)):.3f}" for reference in REFERENCES),
                f"{np.median([row.waiting_share for row in of_scheme]):.1%}",
                f"{np.median([row.changes_per_100 for row in of_scheme]):.3g}",
            ]
            for name, of_scheme in rows.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

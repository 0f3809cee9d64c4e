"""The load schemes beside oracles that know the speeds, where slowness is lasting, episodic, or new in every iteration.

Real training on emulated devices. What predictors and tuners decide over long horizons: deciding.py.
"""

import itertools
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from harness import clusters, oracle, record, segments

from evenstep.cluster.slowness import Episodic, Jitter
from evenstep.schemes import parse_scheme

SPEEDS = (1, 1, 2, 4)
WORKERS, BATCH, SECONDS = 4, 256, 0.08
"""Workers, samples of a global batch, and its seconds if nobody ever waited."""
EPISODES = {"factor": 3.0, "period": 300, "shortest": 10, "longest": 200}
EPOCH = 20
"""Iterations of an epoch; the first epoch, in which all of them learn, is left out of the figures."""
LATE = 2
ITERATIONS = {"persistent": 60, "episodic": 160, "jitter-10": 60, "jitter-30": 60}
REPETITIONS = {"persistent": 3, "episodic": 2, "jitter-10": 3, "jitter-30": 3}

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
SCHEMES = (*REFERENCES, DEFAULT, "dbs")


def main():
    parser = record.arguments(__doc__)
    options = parser.parse_args()
    measured = _trained(options)
    done = record.publish(
        "load_schemes",
        f"Load schemes, {WORKERS} workers",
        options,
        figures=[each for regime in REGIMES for each in _figures(regime, measured.rows[regime])],
        tables=[_table(regime, measured.rows[regime]) for regime in REGIMES],
        config={
            "workers": WORKERS,
            "regimes": REGIMES,
            "speeds_in_persistent": SPEEDS,
            "episodes": {**EPISODES, "share_of_iterations": _duty()},
            "global_batch_size": BATCH,
            "ideal_seconds": SECONDS,
            "epoch_iterations": EPOCH,
            "warmup": EPOCH,
            "late_oracle_iterations": LATE,
            **measured.config,
        },
        raw=measured.raw,
        overrun=measured.overrun,
    )
    return 0 if done else 1


def _duty():
    return (EPISODES["shortest"] + EPISODES["longest"]) / (2 * EPISODES["period"])


def _cluster(regime, seed):
    """Workers that together take the ideal time for the batch where nothing disturbs them."""
    speeds = SPEEDS if regime == "persistent" else [1] * WORKERS
    disturbance = {
        "episodic": Episodic(**EPISODES, seed=seed),
        "jitter-10": Jitter(spread=0.1, seed=seed),
        "jitter-30": Jitter(spread=0.3, seed=seed),
    }.get(regime)
    disturbances = [] if disturbance is None else [(worker, disturbance) for worker in range(WORKERS)]
    return clusters.cluster_of(clusters.proportional(speeds, BATCH, SECONDS), disturbances)


def _scheme(name, cluster, iterations):
    if name == EQUAL:
        return parse_scheme("bsp")
    if name == ORACLE:
        return oracle.oracle(cluster, BATCH, iterations)
    if name == LATE_ORACLE:
        return oracle.oracle(cluster, BATCH, iterations, late=LATE)
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
    overrun: dict


def _trained(options):
    repetitions = 1 if options.quick else max(REPETITIONS.values())
    variants, about = [], {}
    for repetition, regime in itertools.product(range(repetitions), REGIMES):
        if repetition >= REPETITIONS[regime]:
            continue
        iterations = 2 * EPOCH if options.quick else ITERATIONS[regime]
        cluster = _cluster(regime, options.seed + repetition)
        for name in SCHEMES:
            variant = segments.Variant(
                name=f"{regime}/{name}",
                scheme=_scheme(name, cluster, iterations),
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
        global_batch_size=BATCH,
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
    rows = {regime: {} for regime in REGIMES}
    for variant, of_variant in raw.items():
        regime, name = variant.split("/", 1)
        rows[regime][name] = [
            _row(repetition, segment, about[variant, repetition]) for repetition, segment in enumerate(of_variant)
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


def _row(repetition, segment, cluster):
    sizes = segments.sizes_of(segment)
    seconds = clusters.emulated_seconds(cluster, sizes)[EPOCH:]
    changed = (np.diff(sizes[EPOCH:], axis=0) != 0).any(axis=1)
    return Row(
        repetition=repetition,
        samples_per_second=segment["settled_samples_per_second"],
        waiting_share=1.0 - float(seconds.mean(axis=1).sum() / seconds.max(axis=1).sum()),
        changes_per_100=100.0 * float(changed.mean()),
    )


def _compact(segment):
    """The segment with its long lists as text, so that the record stays readable."""
    return {
        **segment,
        "iteration_seconds": " ".join(f"{seconds:.4f}" for seconds in segment["iteration_seconds"]),
        "sizes": [f"{iteration}: {'/'.join(map(str, sizes))}" for iteration, sizes in segment["sizes"]],
    }


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

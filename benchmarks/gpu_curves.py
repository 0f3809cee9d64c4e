"""Four measured GPUs of a heterogeneous cluster: how near the sizes come to the exact optimum, and how soon."""

import sys

from harness import clusters, record, segments

from evenstep.cluster.slowness import MEASURED_CURVES, PointCurve

BATCH, WARMUP, NEAR = 512, 20, 1.05


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    plain = 10
    if options.quick:
        options.repetitions, options.iterations, plain = 1, WARMUP + 10, 4
    curves = [PointCurve.measured(name) for name in MEASURED_CURVES]
    least, by_hand = clusters.best(curves, BATCH)
    plan = segments.Plan(
        cluster=clusters.cluster_of(curves),
        global_batch_size=BATCH,
        variants=(
            segments.Variant(name="lb-bsp", scheme="lb-bsp", iterations=options.iterations, warmup=WARMUP),
            segments.Variant(name="ddp-by-hand", sizes=tuple(by_hand), iterations=3 * plain, warmup=2),
            segments.Variant(name="ddp-equal", iterations=plain, warmup=2),
        ),
        repetitions=options.repetitions,
        seed=options.seed,
        alternate=True,
    )
    raw = segments.run(plan, record.console.print)
    for segment in raw["lb-bsp"]:
        segment["emulated"] = _emulated(segment, curves)
    equal = max(curve.seconds(BATCH // len(curves)) for curve in curves)
    done = record.publish(
        "gpu_curves",
        f"Four measured GPUs, global batch {BATCH}: optimum {1000 * least:.1f} ms, equal sizes {1000 * equal:.1f} ms",
        options,
        config={
            "curves": list(MEASURED_CURVES),
            "global_batch_size": BATCH,
            "optimum_seconds": least,
            "optimum_sizes": by_hand,
            "equal_seconds": equal,
            "repetitions": options.repetitions,
            "iterations": {variant.name: variant.iterations for variant in plan.variants},
            "warmup": {variant.name: variant.warmup for variant in plan.variants},
        },
        figures=_figures(raw, least),
        raw=raw,
        overrun=record.overruns(raw),
    )
    return 0 if done else 1


def _emulated(segment, curves):
    """The emulated time of each iteration: what its sizes take on the slowest device."""
    changes = dict(segment["sizes"])
    seconds, now = [], None
    for iteration in range(segment["iterations"]):
        now = changes.get(iteration, now)
        seconds.append(max(curve.seconds(size) for curve, size in zip(curves, now, strict=True)))
    return seconds


def _reached(emulated, least):
    """The first iteration from which on every one is near the optimum; the number of iterations where none is."""
    far = [iteration for iteration, seconds in enumerate(emulated) if seconds > NEAR * least]
    return far[-1] + 1 if far else 0


def _figures(raw, least):
    ours = raw["lb-bsp"]
    return [
        record.figure("emulated time at the sizes reached, times the optimum",
                      [segment["emulated"][-1] / least for segment in ours], goal="<= 1.05"),
        record.figure("iterations before it is within 5 % for good",
                      [_reached(segment["emulated"], least) for segment in ours], goal="<= 7"),
        record.figure("iteration time of lb-bsp", _milliseconds(ours), unit="ms"),
        record.figure("iteration time of plain DDP, sizes by hand", _milliseconds(raw["ddp-by-hand"]), unit="ms"),
        record.figure("iteration time of plain DDP, equal sizes", _milliseconds(raw["ddp-equal"]), unit="ms"),
        record.figure("changes of size", [len(segment["sizes"]) - 1 for segment in ours]),
    ]  # fmt: skip


def _milliseconds(of_variant):
    return [1000 * segment["settled_iteration_seconds"] for segment in of_variant]


if __name__ == "__main__":
    sys.exit(main())

"""Workers of lasting unlike speeds: evenstep against plain DDP, with exact sizes set by hand and with equal sizes."""

import sys

from harness import clusters, record, segments

# workers: relative speeds, global batch, ideal seconds, iterations (lb-bsp, hand-set, equal), warm-up
CASES = {
    4: ((1, 1, 2, 4), 256, 0.2, (40, 40, 25), 10),
    8: ((1, 1, 1, 1.5, 2, 2, 3, 4), 248, 0.5, (24, 14, 8), 10),
    16: ((1,) * 4 + (1.5,) * 4 + (2,) * 4 + (3,) * 2 + (4,) * 2, 512, 1.0, (20, 12, 6), 10),
}
PLAIN_WARMUP = 2


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--workers", type=int, choices=CASES, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    speeds, batch, ideal, iterations, warmup = CASES[options.workers]
    if options.quick:
        options.repetitions, iterations = 1, (warmup + 4, 6, 4)
    curves = clusters.proportional(speeds, batch, ideal)
    least, by_hand = clusters.best(curves, batch)
    plan = segments.Plan(
        cluster=clusters.cluster_of(curves),
        global_batch_size=batch,
        variants=(
            segments.Variant(name="lb-bsp", scheme="lb-bsp", iterations=iterations[0], warmup=warmup),
            segments.Variant(name="ddp-by-hand", sizes=tuple(by_hand), iterations=iterations[1], warmup=PLAIN_WARMUP),
            segments.Variant(name="ddp-equal", iterations=iterations[2], warmup=PLAIN_WARMUP),
        ),
        repetitions=options.repetitions,
        seed=options.seed,
        alternate=True,
    )
    raw = segments.run(plan, record.console.print)
    done = record.publish(
        f"steady-{options.workers}",
        f"{options.workers} workers, speeds {':'.join(f'{speed:g}' for speed in speeds)}, ideal {ideal:g} s",
        options,
        config={
            "speeds": speeds,
            "global_batch_size": batch,
            "ideal_seconds": ideal,
            "least_possible_seconds": least,
            "sizes_by_hand": by_hand,
            "repetitions": options.repetitions,
            "iterations": {variant.name: variant.iterations for variant in plan.variants},
            "warmup": {variant.name: variant.warmup for variant in plan.variants},
        },
        figures=_figures(raw, options.workers, batch / ideal),
        raw=raw,
        overrun=record.overruns(raw),
    )
    return 0 if done else 1


def _figures(raw, workers, ideal):
    def pace(name, key="settled_samples_per_second"):
        return [segment[key] for segment in raw[name]]

    def ratios(above, below):
        return [a / b for a, b in zip(above, below, strict=True)]

    first = workers == 4
    learning = pace("lb-bsp", "samples_per_second")
    return [
        record.figure("of the ideal samples/s", [s / ideal for s in pace("lb-bsp")], goal=">= 0.95"),
        record.figure(
            "of plain DDP with exact sizes by hand",
            ratios(pace("lb-bsp"), pace("ddp-by-hand")),
            goal=">= 0.98" if first else None,
        ),
        record.figure(
            "times plain DDP with equal sizes",
            ratios(pace("lb-bsp"), pace("ddp-equal")),
            goal=">= 1.9" if first else None,
        ),
        record.figure("of the ideal, start included", [s / ideal for s in learning]),
        record.figure("of sizes by hand, start included", ratios(learning, pace("ddp-by-hand", "samples_per_second"))),
        record.figure("plain DDP, sizes by hand, of the ideal", [s / ideal for s in pace("ddp-by-hand")]),
        record.figure("plain DDP, equal sizes, of the ideal", [s / ideal for s in pace("ddp-equal")]),
        record.figure("iteration of the last change of sizes", [segment["sizes"][-1][0] for segment in raw["lb-bsp"]]),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Workers that are equally fast: what evenstep costs over plain DDP where it has nothing to gain."""

import sys

from harness import clusters, record, segments

WORKERS, BATCH, SECONDS, WARMUP = 4, 128, 0.2, 5


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=WARMUP + 15)
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.iterations = 2, WARMUP + 5
    plan = segments.Plan(
        cluster=clusters.cluster_of(clusters.proportional((1,) * WORKERS, BATCH, SECONDS)),
        global_batch_size=BATCH,
        variants=(
            segments.Variant(name="ddp", iterations=options.iterations, warmup=WARMUP),
            segments.Variant(name="lb-bsp", scheme="lb-bsp", iterations=options.iterations, warmup=WARMUP),
            segments.Variant(name="bsp", scheme="bsp", iterations=options.iterations, warmup=WARMUP),
        ),
        repetitions=options.repetitions,
        seed=options.seed,
        alternate=True,
    )
    raw = segments.run(plan, record.console.print)
    done = record.publish(
        "equal_workers",
        f"{WORKERS} equal workers, iterations of {SECONDS:g} s, paired with plain DDP",
        options,
        config={
            "workers": WORKERS,
            "global_batch_size": BATCH,
            "emulated_seconds": SECONDS,
            "repetitions": options.repetitions,
            "iterations": options.iterations,
            "warmup": WARMUP,
        },
        figures=_figures(raw),
        raw=raw,
        overrun=record.overruns(raw),
    )
    return 0 if done else 1


def _figures(raw):
    seconds = {name: [segment["settled_iteration_seconds"] for segment in raw[name]] for name in raw}

    def over_ddp(name):
        return [ours / ddp for ours, ddp in zip(seconds[name], seconds["ddp"], strict=True)]

    return [
        record.figure("iteration time of lb-bsp, times plain DDP's", over_ddp("lb-bsp"), goal="<= 1.01"),
        record.figure("iteration time of bsp, times plain DDP's", over_ddp("bsp"), goal="<= 1.01"),
        *(
            record.figure(f"iteration time of {name}", [1000 * s for s in seconds[name]], unit="ms")
            for name in ("ddp", "lb-bsp", "bsp")
        ),
        record.figure("changes of size under lb-bsp", [len(segment["sizes"]) - 1 for segment in raw["lb-bsp"]]),
    ]


if __name__ == "__main__":
    sys.exit(main())

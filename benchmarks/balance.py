"""`evenstep.balance` on lognormal lengths: against the largest differencing method, with unequal speeds, its time."""

import heapq
import sys
import time

import numpy as np
from harness import record

import evenstep

SPREADS = (0.5, 1.0, 1.5)
SIZES = ((64, 8), (128, 8), (512, 8), (256, 16), (1024, 16), (512, 32), (2048, 32))
SPEEDS = (1, 1, 2, 4)
LARGE = (10_000, 64)


def main():
    options = record.arguments(__doc__).parse_args()
    seeds, times = (2, 3) if options.quick else (10, 25)
    cases = [
        _case(items, workers, spread, options.seed + seed)
        for items, workers in SIZES for spread in SPREADS for seed in range(seeds)
    ]  # fmt: skip
    seconds = {spread: [_timed(_lengths(LARGE[0], spread, options.seed)) for _ in range(times)] for spread in SPREADS}
    done = record.publish(
        "balance",
        f"evenstep.balance on lognormal lengths, {len(cases)} cases",
        options,
        config={"sizes": SIZES, "spreads": SPREADS, "seeds": seeds, "speeds": SPEEDS, "large": LARGE, "times": times},
        figures=[
            record.figure("latest worker over that of differencing (Karmarkar-Karp)",
                          [each["ours"] / each["differencing"] for each in cases], goal="<= 1"),
            record.figure("latest worker over the mean", [each["ours"] / each["mean"] for each in cases]),
            record.figure("the same by differencing", [each["differencing"] / each["mean"] for each in cases]),
            record.figure("latest worker over a lower bound, speeds 1:1:2:4",
                          [each["with_speeds"] for each in cases], goal="<= 1.03"),
            *(record.figure(f"10,000 items on 64 workers, spread {spread}", [1e3 * each for each in seconds[spread]],
                            unit="ms", goal="<= 10") for spread in SPREADS),
        ],
        raw={"cases": cases, "seconds": {str(spread): each for spread, each in seconds.items()}},
    )  # fmt: skip
    return 0 if done else 1


def _lengths(items, spread, seed):
    return np.clip(np.random.default_rng(seed).lognormal(7, spread, items), 16, 32768).astype(np.int64)


def _case(items, workers, spread, seed):
    costs = _lengths(items, spread, seed)
    speeds = np.resize(SPEEDS, workers)
    with_speeds = _latest(evenstep.balance(costs, workers, speeds=speeds), costs, speeds)
    return {
        "items": items,
        "workers": workers,
        "spread": spread,
        "seed": seed,
        "mean": float(costs.sum() / workers),
        "ours": _latest(evenstep.balance(costs, workers), costs, np.ones(workers)),
        "differencing": float(differencing(costs.tolist(), workers)),
        "with_speeds": with_speeds / _lower_bound(costs, speeds),
    }


def _lower_bound(costs, speeds):
    """The mean; and of the k largest items one is on the k-th fastest worker or a slower one, or two share a worker."""
    largest, fastest = np.sort(costs)[::-1][: len(speeds)], np.sort(speeds)[::-1]
    return max(costs.sum() / speeds.sum(), np.minimum(largest / fastest, 2 * largest / fastest[0]).max())


def _latest(parts, costs, speeds):
    return float(max(sum(costs[own].sum() for own in part) / speed for part, speed in zip(parts, speeds, strict=True)))


def differencing(costs, workers):
    """The largest part by the method that trainers use: the two most uneven partial divisions are merged, and so on."""
    heap = [(-cost, number, [0] * (workers - 1) + [cost]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        sums = sorted(one + other for one, other in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (sums[0] - sums[-1], number, sums))
    return heap[0][2][-1]


def _timed(costs):
    began = time.perf_counter()
    evenstep.balance(costs, LARGE[1])
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

"""What a sum of gradients costs right after a wait, when all workers wake at once: Gloo's ring against direct hops.

No training: every worker sleeps as if it computed, then all sum a tensor. It is why evenstep sums the last, small
bucket in two hops, or one between two workers (`evenstep.torch.engines.direct_sum`), and where it leaves that to the
ring.
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers

from evenstep.torch.engines.direct_sum import DirectSum
from evenstep.torch.processes.join_workers import join_workers

ELEMENTS = (5_000, 51_000, 250_000, 1_000_000)
COMPUTE_SECONDS = 0.05


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    calls = 3 if options.quick else 15
    figures, raw = [], {}
    for count in (2, 4, 8, 16):
        cases = run_workers(count, _measure, (options.repetitions, calls), show=record.console.print)
        raw[count] = cases
        for elements, case in cases.items():
            ratios = [direct / ring for direct, ring in zip(case["direct_ms"], case["ring_ms"], strict=True)]
            hops = "one hop" if count == 2 else "two hops"
            chosen = f"{hops} chosen" if case["suits"] else "ring chosen"
            name = f"{count} workers, {elements} floats ({chosen})"
            figures += [
                record.figure(f"{name}: ring", case["ring_ms"], unit="ms"),
                record.figure(f"{name}: {hops}", case["direct_ms"], unit="ms"),
                record.figure(f"{name}: {hops}, times the ring", ratios, goal="<= 1" if case["suits"] else None),
            ]
    done = record.publish(
        "small_sums",
        "Sum of a float32 tensor over all workers after a wait of 50 ms, two cores",
        options,
        config={"calls_per_repetition": calls, "repetitions": options.repetitions, "elements": list(ELEMENTS)},
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def _measure(rank, plan, tell):
    repetitions, calls = plan
    workers = join_workers(torch.device("cpu"), 300.0)
    direct_sum = DirectSum(workers)

    def ring(tensor):
        dist.all_reduce(tensor, group=workers.device_group)

    def direct(tensor):
        direct_sum.sum(tensor, lambda: [0] * 7)

    cases = {}
    for elements in ELEMENTS:
        tensor = torch.zeros(elements)
        case = {"suits": tensor.nbytes <= direct_sum.most_bytes, "ring_ms": [], "direct_ms": []}
        for _ in range(repetitions):
            for name, way in (("ring_ms", ring), ("direct_ms", direct)):
                case[name].append(1000 * median(_once(way, tensor) for _ in range(calls)))
        tell(f"  {workers.count} workers, {elements} floats: {case}")
        cases[elements] = case
    return cases


def _once(way, tensor):
    dist.barrier()
    time.sleep(COMPUTE_SECONDS)
    began = time.perf_counter()
    way(tensor)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to sample the driving factors of a worker's speed, once an iteration, on this machine.

Between two samples the process computes for as long as an iteration may take, because some readings are taken only when
enough time has passed: short iterations share them, long ones have them in every sample.
"""

import sys
import time

import numpy as np
import torch
from harness import record

from evenstep.torch.factors import sampler_of

LIMIT_MS = 0.1
COMPUTE_SECONDS = {"back to back": 0.0, "10 ms": 0.01, "100 ms": 0.1, "1 s": 1.0}
"""The length of an iteration, by its name in the figures."""
SAMPLES = {"back to back": 2000, "10 ms": 200, "100 ms": 40, "1 s": 5}
PARTS = 5


def main():
    options = record.arguments(__doc__).parse_args()
    parts = 1 if options.quick else PARTS
    torch.set_num_threads(1)
    sampler = sampler_of(torch.device("cpu"), time.perf_counter)
    raw, figures = {}, []
    for name, seconds in COMPUTE_SECONDS.items():
        record.console.print(f"  iterations of {name}" if seconds else f"  {name}")
        raw[name] = [_measure(sampler, seconds, SAMPLES[name]) for _ in range(parts)]
        words = f"iterations of {name}" if seconds else name
        figures += [
            record.figure(f"{words}: mean", _of(raw[name], np.mean), goal=f"<= {LIMIT_MS:g}", unit="ms"),
            record.figure(f"{words}: median", _of(raw[name], np.median), unit="ms"),
            record.figure(f"{words}: 99th percentile", _of(raw[name], lambda ms: np.percentile(ms, 99)), unit="ms"),
        ]
    sampler.close()
    done = record.publish(
        "factors",
        "Time to sample the factors of one worker, per iteration",
        options,
        config={"compute_seconds": COMPUTE_SECONDS, "samples_per_part": SAMPLES, "parts": parts},
        figures=figures,
        raw=raw if not options.quick else None,
    )
    return 0 if done else 1


def _of(parts, statistic):
    return [float(statistic(part)) for part in parts]


def _measure(sampler, seconds, samples):
    """Milliseconds of each sample."""
    taken = []
    for _ in range(samples):
        _compute(seconds)
        began = time.perf_counter()
        sampler.sample()
        taken.append(round(1000 * (time.perf_counter() - began), 5))
    return taken


def _compute(seconds):
    until, values = time.thread_time() + seconds, torch.rand(256, 256)
    while time.thread_time() < until:
        values = torch.tanh(values @ values)


if __name__ == "__main__":
    sys.exit(main())

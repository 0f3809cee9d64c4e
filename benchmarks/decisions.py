"""How long a server takes to decide on one push, in one thread: what it spends beside the tensors.

Workers of unlike speeds push in virtual time, through the very policies and coordinator. Only their own time counts:
from a push that is known to the commands that answer it.
"""

import heapq
import sys
import time

import numpy as np
from harness import record

from evenstep.core.coordinate import Answer, Arrival, Coordinator
from evenstep.core.sync import Push, Release
from evenstep.core.values import UNLIMITED, Problem
from evenstep.schemes import parse_scheme

SCHEMES = ("asp", "ssp:bound=3", "dssp:lower=3,upper=15", "asp:load=lb-bsp")
WORKERS = (10, 1_000, 10_000)
PER_WORKER = 8
FASTEST_SECONDS, SLOWEST_SECONDS = 1.0, 4.0


def main():
    options = record.arguments(__doc__).parse_args()
    workers = WORKERS[:2] if options.quick else WORKERS
    pushes, repetitions = (2_000, 3) if options.quick else (10_000, 3)
    raw = {}
    for repetition in range(repetitions):
        record.console.print(f"  repetition {repetition + 1} of {repetitions}")
        for name, measure in _measurements(workers, pushes).items():
            raw.setdefault(name, []).append(measure(np.random.default_rng(options.seed + repetition)))
    done = record.publish(
        "decisions",
        "Time to decide, in one thread",
        options,
        config={
            "pushes": f"{pushes}, at least two for each worker",
            "seconds_of_an_iteration": [FASTEST_SECONDS, SLOWEST_SECONDS],
            "per_worker": PER_WORKER,
            "figure": "mean over the pushes of a repetition",
        },
        figures=[record.figure(name, values, unit="us") for name, values in raw.items()],
        raw=raw,
    )
    return 0 if done else 1


def _measurements(workers, pushes):
    """By name, what takes a random generator and returns microseconds."""
    measurements = {}
    for scheme in map(parse_scheme, SCHEMES):
        for count in workers:
            many = max(pushes, 2 * count)
            if "load" not in scheme.name:
                measurements[f"{scheme.name}, {count} workers: policy"] = (
                    lambda random, sync=scheme.sync, count=count, many=many: _policy(sync, count, many, random)
                )
            measurements[f"{scheme.name}, {count} workers: coordinator"] = (
                lambda random, scheme=scheme, count=count, many=many: _coordinator(scheme, count, many, random)
            )
    return measurements


def _policy(sync, workers, pushes, random):
    """Microseconds of a sync policy for a push."""
    seconds, iterations, running, spent = _speeds(random, workers), [0] * workers, [], 0
    policy = sync.policy(workers)
    for worker in range(workers):
        policy.on_join(worker, 0.0)
        running.append((seconds[worker], worker))
    heapq.heapify(running)
    for version in range(pushes):
        now, worker = heapq.heappop(running)
        iterations[worker] += 1
        push = Push(
            worker=worker, iteration=iterations[worker], samples=PER_WORKER, units=PER_WORKER, share=1 / workers,
            version=version,
        )  # fmt: skip
        began = time.perf_counter_ns()
        commands = policy.on_push(push, now)
        spent += time.perf_counter_ns() - began
        for command in commands:
            if isinstance(command, Release):
                heapq.heappush(running, (now + seconds[command.worker], command.worker))
    return spent / pushes / 1000


def _coordinator(scheme, workers, pushes, random):
    """Microseconds of the coordinator for a push, its sync policy and its load policy included."""
    seconds, running, spent = _speeds(random, workers), [], 0
    limits = np.ones(workers, dtype=np.int64)
    problem = Problem(global_batch_size=PER_WORKER * workers, minimum=limits, maximum=limits * UNLIMITED)
    coordinator = Coordinator(sync=scheme.sync, load=scheme.load, problem=problem, length=10**12)

    def carry_out(commands, now):
        for command in commands:
            if isinstance(command, Answer) and command.claims:
                heapq.heappush(running, (now + seconds[command.worker], command.worker, command))

    for worker in range(workers):
        coordinator.join(worker)
    for worker in range(workers):
        carry_out(coordinator.begin(worker, 0, 0, 0.0), 0.0)
    for sequence in range(pushes):
        now, worker, answer = heapq.heappop(running)
        claim, taken = answer.claims[0], seconds[worker]
        size, per_sample = claim.samples, taken / PER_WORKER
        arrival = Arrival(
            key=(worker, 0, sequence), claim=claim.number, version=answer.version, samples=size, units=size,
            row=(size, round(size * per_sample * 1e6), 0, UNLIMITED),
        )  # fmt: skip
        began = time.perf_counter_ns()
        commands = coordinator.push(arrival, now)
        spent += time.perf_counter_ns() - began
        carry_out(commands, now)
    return spent / pushes / 1000


def _speeds(random, workers):
    return random.uniform(FASTEST_SECONDS, SLOWEST_SECONDS, workers).tolist()


if __name__ == "__main__":
    sys.exit(main())

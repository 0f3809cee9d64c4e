"""Members that come and go: evenstep under torchft's quorum, beside torchft alone on the same script.

Each replica sleeps for every sample that it computes on, in the forward pass. Alone, torchft gives each replica the
same batch, finds the members during the forward pass, and divides by their number. Both use one Lighthouse's settings.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import record

os.environ.setdefault("RUST_LOG", "error")  # torchft reads this when it is imported.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torchft", "evenstep.torch.prepare"])
CONTESTANTS = ("torchft", "evenstep")
FEATURES, HIDDEN, PER_SAMPLE, WARMUP = 64, 256, 0.002, 20
SLOWNESS = (1, 1, 2, 4)
HEARTBEAT_SECONDS, TIMEOUT_SECONDS, STORM_SECONDS = 1, 30, 5


@dataclass(frozen=True)
class Case:
    slowness: tuple
    global_batch_size: int
    seconds: float
    kills: tuple = ()
    """When a replica is killed, which is started again if `again`."""
    again: bool = True


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    repetitions, long = (1, 4.0) if options.quick else (options.repetitions, 6.0)
    storm = 15.0 if options.quick else 30.0
    even = Case((1, 1), 50, long)
    unequal = Case(SLOWNESS, 352, 3 * long)
    killed = Case((1, 1, 1), 75, long + HEARTBEAT_SECONDS, kills=(long / 2,), again=False)
    storms = Case((1, 1, 1, 1), 100, storm, kills=tuple(range(STORM_SECONDS, int(storm), STORM_SECONDS)))
    three = Case((1, 1, 1), 75, long)
    results = {name: {each: [] for each in CONTESTANTS} for name in ("even", "unequal", "killed", "storm", "three")}
    cases = {"even": even, "unequal": unequal, "killed": killed, "storm": storms, "three": three}
    for repetition, (name, case) in itertools.product(range(repetitions), cases.items()):
        if name == "storm" and repetition:
            continue
        for contestant in CONTESTANTS:
            if name == "three" and contestant == "evenstep":
                continue
            found = measured(contestant, case, options.seed + repetition, gap=name == "killed")
            results[name][contestant].append(found)
            record.console.print(f"  {repetition + 1}/{repetitions} {name} {contestant}: {found:.4g}")
    iteration = 25 * PER_SAMPLE
    ideal = unequal.global_batch_size / sum(1 / (each * PER_SAMPLE) for each in SLOWNESS)
    pairs = {
        name: list(zip(each["evenstep"], each["torchft"], strict=True))
        for name, each in results.items()
        if name != "three"
    }
    figures = [
        record.figure("an iteration of 50 ms, of torchft's", [b / a for a, b in pairs["even"]], goal="<= 1.05"),
        record.figure(
            "speeds 1:1:2:4, of the ideal",
            [each * ideal / unequal.global_batch_size for each in results["unequal"]["evenstep"]],
            goal=">= 0.93",
        ),
        record.figure("speeds 1:1:2:4, of torchft's samples/s", [a / b for a, b in pairs["unequal"]]),
        record.figure(
            "from a kill to the next step, beyond torchft's",
            [(a - b) / iteration for a, b in pairs["killed"]],
            goal="<= 1",
            unit="iterations",
        ),
        record.figure("from a kill to the next step", results["killed"]["evenstep"], unit="s"),
        record.figure("a kill every 5 s, of torchft's samples/s", [a / b for a, b in pairs["storm"]]),
        record.figure(
            "a kill every 5 s, of torchft's with three of the four and no kill",
            [a / median(results["three"]["torchft"]) for a in results["storm"]["evenstep"]],
            goal=">= 0.85",
        ),
    ]
    record.publish(
        "elastic",
        "Replicas under torchft's quorum, with evenstep and without",
        options,
        config={
            "seconds_per_sample": PER_SAMPLE,
            "slowness": SLOWNESS,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "timeout_seconds": TIMEOUT_SECONDS,
            "storm_seconds": storm,
            "repetitions": repetitions,
            "case_seconds": long,
        },
        figures=figures,
        raw=results,
    )
    return 0


def measured(contestant, case, seed, *, gap):
    """Samples per second after the first steps; with `gap` the seconds from the kill to the next step that counts.

    Until the end of the case: one that stops for ever after a kill would else have the rate before it.
    """
    steps, kills, end = run(contestant, case, seed)
    times = sorted({step: at for step, at, _ in reversed(steps)}.items())
    if gap:  # Others may still complete the step in which the replica died.
        after = [at for _, at in times if at > kills[0] - PER_SAMPLE * case.global_batch_size]
        return max(late - early for early, late in itertools.pairwise(after))
    first, last = times[min(WARMUP, len(times) // 3)][1], end if case.kills else times[-1][1]
    samples = {step: count for step, _, count in steps}
    return sum(samples[step] for step, at in times if at > first) / (last - first)


def run(contestant, case, seed):
    """The steps that counted, as tuples of number, time and samples, by time; when replicas were killed; the end."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=TIMEOUT_SECONDS * 1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=HEARTBEAT_SECONDS * 1000,
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    replicas, chosen, kills = len(case.slowness), random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:

        def start(slot, life):
            arguments = contestant, slot, case, address, str(Path(folder, f"{slot}-{life}"))
            process = CONTEXT.Process(target=replica, args=arguments)
            process.start()
            return process

        running = {slot: start(slot, 0) for slot in range(replicas)}
        lives = dict.fromkeys(running, 0)
        try:
            while len(began := _steps(folder)) < 3 * replicas:
                time.sleep(0.05)
            zero = began[-1][1]
            for due in (*case.kills, case.seconds):
                time.sleep(max(0.0, zero + due - time.time()))
                if due == case.seconds:
                    break
                slot = chosen.choice(sorted(running))
                kills.append(time.time())
                running.pop(slot).kill()
                if case.again:
                    lives[slot] += 1
                    running[slot] = start(slot, lives[slot])
            return _steps(folder), kills, time.time()
        finally:
            for process in running.values():
                process.kill()
                process.join()
            lighthouse.shutdown()


def _steps(folder):
    lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda step: step[1])


def replica(contestant, slot, case, lighthouse, log):
    """One process; it trains until it is killed."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(slot), GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.manual_seed(0)
    model, dataset = Sleeping(case.slowness[slot]), torch.utils.data.TensorDataset(torch.randn(200_000, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with open(log, "w", buffering=1) as file:
        loops = {"torchft": with_torchft, "evenstep": with_evenstep}
        for step, samples in loops[contestant](model, optimizer, dataset, case, lighthouse, slot):
            print(json.dumps([step, time.time(), samples]), file=file)


def with_torchft(model, optimizer, dataset, case, lighthouse, slot):
    from datetime import timedelta

    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=str(slot),
        hostname="localhost",
    )

    def hook(state, bucket):
        state.allreduce(bucket.buffer()).wait()  # Returns without an error, which `should_commit` knows of.
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    DistributedDataParallel._comm_hook = staticmethod(hook)  # torchft 0.2's own fails itself where a sum fails.
    whole, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    batch = case.global_batch_size // len(case.slowness)
    for (inputs,) in itertools.cycle(torch.utils.data.DataLoader(dataset, batch_size=batch)):
        managed.zero_grad()
        whole(inputs).square().mean().backward()
        before = manager.current_step()
        managed.step()
        if manager.current_step() > before:
            yield before, batch * manager.num_participants()


def with_evenstep(model, optimizer, dataset, case, lighthouse, slot):
    import torch

    import evenstep
    from evenstep.launch.launch_settings import LaunchSettings

    settings = LaunchSettings(elastic=(1, len(case.slowness)), lighthouse=lighthouse, timeout=str(TIMEOUT_SECONDS))
    os.environ.update(settings.to_environment())
    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, global_batch_size=case.global_batch_size)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        before = loader.session.step
        optimizer.step()
        if loader.session.counted:
            yield before, sum(loader.batch_sizes)


def Sleeping(slowness):
    import torch

    class Model(torch.nn.Sequential):
        def forward(self, inputs):
            time.sleep(len(inputs) * PER_SAMPLE * slowness)
            return super().forward(inputs)

    return Model(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, 1),
    )


if __name__ == "__main__":
    sys.exit(main())

"""Replicas under torchft's quorum, as processes that kill, stop or fail themselves where a test says."""

import json
import multiprocessing.connection
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.guard import GUARD_SECONDS
from support.processes import CONTEXT

os.environ.setdefault("RUST_LOG", "error")  # torchft reads this when it is imported, and tells of each quorum.

FEATURES = 6


@dataclass(kw_only=True)
class Elastic:
    """A run of so many replicas.

    `faults`: by replica and step, what its first process does there: `kill`, `stop`, `raise` or `exit` before the
    backward, `kill in backward`, `kill before step`, `kill after step`. `waits`: by step, the replica whose second
    process must have come to its first batch before the others go on. `until`: the step after which all stop, and
    replica 0 saves its state in the file `checkpoint`; a run without `until` begins with what is saved there.
    """

    replicas: int = 3
    samples: int = 960
    global_batch_size: int = 24
    epochs: int = 2
    faults: dict = field(default_factory=dict)
    waits: dict = field(default_factory=dict)
    slow: tuple = ()
    num_workers: int = 0
    timeout_seconds: float = 20.0
    options: dict = field(default_factory=dict)
    checkpoint: str = ""
    until: int = -1


@dataclass
class Outcome:
    """`weights` of each process that finished, by replica; the `steps` that counted, as each process recorded them."""

    weights: dict = field(default_factory=dict)
    exits: list = field(default_factory=list)
    steps: list = field(default_factory=list)


def parts(run):
    import torch

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(run.samples, FEATURES, generator=generator, dtype=torch.float64)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))  # What replicas begin with is not the same by itself.
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=run.num_workers)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
    return layers, optimizer, loader


def alone(run):
    """The weights of one process in plain torch, from the initial weights of the replica that begins."""
    import torch

    found = []
    for first in range(run.replicas):
        os.environ["RANK"] = str(first)
        layers, optimizer, loader = parts(run)
        del os.environ["RANK"]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        for epoch in range(run.epochs):
            order = torch.randperm(run.samples, generator=torch.Generator().manual_seed(epoch))
            for start in range(0, run.samples, run.global_batch_size):
                inputs, targets = loader.dataset[order[start : start + run.global_batch_size]]
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(layers(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
        found.append(torch.cat([each.detach().flatten() for each in layers.parameters()]))
    return found


def replica(run, slot, life, lighthouse, all_here, coming, folder):
    """One process of a replica."""
    import torch

    import evenstep
    from evenstep.launch.launch_settings import LaunchSettings

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    settings = LaunchSettings(
        elastic=(1, run.replicas), lighthouse=lighthouse, slow=run.slow, timeout=str(run.timeout_seconds)
    )
    os.environ.update(settings.to_environment(), RANK=str(slot), RUST_LOG="error", GLOO_SOCKET_IFNAME="lo")
    model, optimizer, loader = parts(run)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, global_batch_size=run.global_batch_size, schedulers=scheduler, **run.options
    )
    session, faults = loader.session, run.faults if life == 0 else {}
    saved = (model, optimizer, scheduler, loader)
    restore(run, saved)
    with Path(folder, f"{slot}-{life}.jsonl").open("w", encoding="utf-8") as log:
        if life:
            coming[slot].set()
        else:
            all_here.wait(GUARD_SECONDS)
        for epoch in range(loader.epoch, run.epochs):
            for inputs, targets in loader:
                step = session.step
                fault = faults.get((slot, step), "")
                fail(fault)
                optimizer.zero_grad()
                outputs = model(inputs)
                if fault == "kill in backward":
                    outputs.register_hook(lambda _: fail("kill"))
                torch.nn.functional.mse_loss(outputs, targets).backward()
                if fault == "kill before step":
                    fail("kill")
                optimizer.step()
                if fault == "kill after step":
                    fail("kill")
                scheduler.step()
                if session.counted:
                    line = {"step": step, "epoch": epoch, "sizes": loader.batch_sizes, "slot": slot, "life": life}
                    line |= {"positions": list(loader.current.positions[: loader.current.samples]), "at": time.time()}
                    print(json.dumps(line), file=log, flush=True)
                if session.step == run.until:
                    return save(run, slot, saved)
                wait(run, session.step, slot, life, coming)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    Path(folder, f"{slot}-{life}.weights").write_text(json.dumps(weights.tolist()), encoding="utf-8")


def restore(run, parts):
    import torch

    if run.checkpoint and run.until < 0:
        for part, state in zip(parts, torch.load(run.checkpoint, weights_only=False), strict=True):
            part.load_state_dict(state)


def save(run, slot, parts):
    import torch

    if slot == 0:
        torch.save([part.state_dict() for part in parts], run.checkpoint)


def wait(run, step, slot, life, coming):
    if step in run.waits and (life == 0 or run.waits[step] != slot):
        assert coming[run.waits[step]].wait(GUARD_SECONDS)


def fail(fault):
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "raise":
        raise RuntimeError("a fault of the script")


def run_replicas(run, *, restarts=1) -> Outcome:
    """Start the replicas, and each one that fails again; kill those that have stopped once all others have ended."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    coming = [CONTEXT.Event() for _ in range(run.replicas)]
    all_here = CONTEXT.Barrier(run.replicas)
    outcome, deadline = Outcome(), time.monotonic() + GUARD_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        running: dict[Any, tuple[int, int, Any]] = {}

        def start(slot, life):
            process = CONTEXT.Process(target=replica, args=(run, slot, life, address, all_here, coming, folder))
            process.start()
            running[process.sentinel] = slot, life, process

        for slot in range(run.replicas):
            start(slot, 0)
        stopped = {slot for (slot, _), fault in run.faults.items() if fault == "stop"}
        try:
            while {slot for slot, life, _ in running.values()} - stopped:
                ready = multiprocessing.connection.wait(list(running), max(0.0, deadline - time.monotonic()))
                assert ready, f"replicas {[each[:2] for each in running.values()]} did not finish in time"
                for sentinel in ready:
                    slot, life, process = running.pop(sentinel)
                    process.join()
                    outcome.exits.append((slot, life, process.exitcode))
                    if process.exitcode and life < restarts:
                        start(slot, life + 1)
        finally:
            for _, _, process in running.values():
                process.kill()
                process.join()
            lighthouse.shutdown()
        for file in Path(folder).glob("*.weights"):
            outcome.weights[file.stem] = json.loads(file.read_text(encoding="utf-8"))
        for file in Path(folder).glob("*.jsonl"):
            outcome.steps += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return outcome

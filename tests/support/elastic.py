"""Replicas under torchft's quorum, as processes that kill, stop or fail themselves where a test says."""

import json
import multiprocessing.connection
import os
import signal
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from support.guard import GUARD_SECONDS
from support.ports import free_port
from support.processes import CONTEXT

os.environ.setdefault("RUST_LOG", "error")  # torchft reads this when it is imported, and tells of each quorum.

FEATURES = 6


@dataclass(kw_only=True)
class Elastic:
    """A run of so many replicas.

    `faults`: by replica and step, what it does there, the n-th process of a replica the n-th of its faults: `kill`,
    `stop`, `raise` or `exit` before the backward, `kill in backward`, `kill before step`, `kill after step`, or `nan`
    in its gradient from then on or `nan once`; under local steps, where steps are periods, each so many batches `late`.
    `waits`: by step, the processes (replica and life) that must have come to their first batch before the others go on.
    `other`: the samples with which a process (replica and life) is started instead of `samples`, or None for other
    contents. `habit`: how the script weighs and measures, `plain`, `units` or `no units`; or `masked`: the model has a
    mask of infinities, and a parameter that is frozen. `until`: the step after which all stop, and replica 0 saves its
    state in the file `checkpoint`, each process its part; a run without `until` begins with what is saved there.
    `momentum` and `decay`: of the optimizer, and of its rate after each 7 steps. `split`: the names of the dimensions
    of a replica's mesh, as in `support.meshes`; it has two processes then, of which the second does what `faults` says.
    """

    replicas: int = 3
    samples: int = 960
    global_batch_size: int = 24
    epochs: int = 2
    faults: dict = field(default_factory=dict)
    late: int = 0
    waits: dict = field(default_factory=dict)
    slow: tuple = ()
    other: dict = field(default_factory=dict)
    num_workers: int = 0
    timeout_seconds: float = 20.0
    options: dict = field(default_factory=dict)
    checkpoint: str = ""
    until: int = -1
    habit: str = "plain"
    momentum: float = 0.9
    decay: float = 0.9
    split: tuple = ()

    @property
    def processes(self):
        """Of each replica."""
        return 2 if self.split else 1

    @property
    def local(self):
        """Whether replicas take local steps."""
        return "period" in self.options.get("scheme", "")


@dataclass
class Outcome:
    """`weights` of each process that finished, and the `errors` of those that raised, by replica and life; the indices
    that each `reads` in its data workers; the `steps` that counted, as each process recorded them; the last of the
    `warnings` of each."""

    weights: dict = field(default_factory=dict)
    errors: dict = field(default_factory=dict)
    reads: dict = field(default_factory=dict)
    exits: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    warnings: list = field(default_factory=list)


def parts(run, other=(), reads=None):
    import torch

    samples = run.samples if None in other or not other else other[0]
    generator = torch.Generator().manual_seed(8 if None in other else 7)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    torch.manual_seed(1 + int(os.environ["SLOT"]))  # What replicas begin with is not the same by itself.
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    if run.habit == "masked":
        layers.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        layers[2].bias.requires_grad_(False)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    if reads is not None:
        dataset = Reading(dataset, reads)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=run.num_workers)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=run.momentum)
    return layers, optimizer, loader


class Reading:
    """Notes each sample that a data worker reads."""

    def __init__(self, dataset, file):
        self.dataset, self.file = dataset, file

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        with self.file.open("a", encoding="utf-8") as file:
            print(index, file=file)
        return self.dataset[index]


def alone(run, left_out=()):
    """The weights of one process in plain torch, from the initial weights of the replica that begins.

    `left_out`: the epochs and positions of the samples whose gradients are not added.
    """
    import torch

    found = []
    for first in range(run.replicas):
        os.environ["SLOT"] = str(first)
        layers, optimizer, loader = parts(run)
        del os.environ["SLOT"]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        for epoch in range(run.epochs):
            order = torch.randperm(run.samples, generator=torch.Generator().manual_seed(epoch))
            for start in range(0, run.samples, run.global_batch_size):
                inputs, targets = loader.dataset[order[start : start + run.global_batch_size]]
                optimizer.zero_grad()
                counts = [[(epoch, start + index) not in left_out] for index in range(len(inputs))]
                (torch.tensor(counts) * (layers(inputs) - targets) ** 2).mean().backward()
                optimizer.step()
                scheduler.step()
        found.append(torch.cat([each.detach().flatten() for each in layers.parameters()]))
    return found


def alone_locally(run, steps):
    """The weights of one process that takes the local steps of all replicas, in these `steps` of periods that counted.

    Written out after Stich, ICLR 2019, and Algorithm 1 of arXiv 2311.08105 with its default outer optimizer; weights
    and momentum count by samples.
    """
    import torch

    found, diloco = [], run.options["scheme"].startswith("diloco")
    for first in range(run.replicas):
        os.environ["SLOT"] = str(first)
        layers, optimizer, loader = parts(run)
        del os.environ["SLOT"]
        weights, taken = list(layers.parameters()), 0
        outer = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
        for period in sorted({line["step"] for line in steps}):
            begun, moved = [each.detach().clone() for each in weights], buffers(run, optimizer, weights)
            members, ends = members_of(run, [line for line in steps if line["step"] == period]), []
            for lines in members:
                if any(line["nan"] for line in lines):
                    continue
                for weight, start, buffer in zip(weights, begun, moved, strict=True):
                    weight.data = start.clone()
                    optimizer.state[weight]["momentum_buffer"] = buffer if buffer is None else buffer.clone()
                step_locally(run, layers, optimizer, loader.dataset, lines, taken)
                samples = sum(len(line["positions"]) for line in lines)
                ends.append((samples, [each.data for each in weights], buffers(run, optimizer, weights)))
            taken += max(map(len, members))
            for number, (weight, start) in enumerate(zip(weights, begun, strict=True)):
                mean = averaged(ends, 1, number)
                weight.data, weight.grad = (start, start - mean) if diloco else (mean, None)
                if run.momentum and weight.requires_grad:
                    optimizer.state[weight]["momentum_buffer"] = averaged(ends, 2, number)
            outer.step()
        found.append(torch.cat([each.detach().flatten() for each in weights]))
    return found


def buffers(run, optimizer, weights):
    return [optimizer.state[each].get("momentum_buffer") if run.momentum else None for each in weights]


def step_locally(run, layers, optimizer, dataset, lines, taken):
    """Take the steps of a member of a period, before which so many were `taken`."""
    import torch

    for index, line in enumerate(lines):
        order = torch.randperm(run.samples, generator=torch.Generator().manual_seed(line["epoch"]))
        inputs, targets = dataset[order[line["positions"]]]
        optimizer.param_groups[0]["lr"] = 0.05 * run.decay ** ((taken + index) // 7)
        if len(inputs):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(layers(inputs), targets).backward()
            optimizer.step()


def averaged(ends, part, number):
    """The mean of this tensor of all members, by their samples."""
    return sum(end[0] * end[part][number] for end in ends) / sum(end[0] for end in ends)


def members_of(run, lines):
    """The lines of each member of a period; one that ended before it recorded them took what the others did not."""
    by_member = {}
    for line in lines:
        by_member.setdefault((line["slot"], line["life"]), []).append(line)
    if len(by_member) < len(lines[0]["sizes"]):
        assert len(by_member) == len(lines[0]["sizes"]) - 1
        together = zip(*by_member.values(), strict=True)
        by_member["ended"] = [{**each[0], "positions": left_of(run, each)} for each in together]
    return list(by_member.values())


def left_of(run, lines):
    """The positions of a slice that these members did not take."""
    start, taken = lines[0]["iteration"] * run.global_batch_size, {each for line in lines for each in line["positions"]}
    return [each for each in range(start, start + sum(lines[0]["sizes"])) if each not in taken]


def environment_of(run, slot, rank, port, lighthouse):
    """As `evenstep run --elastic` sets it."""
    from evenstep.launch.launch_settings import LaunchSettings

    settings = LaunchSettings(
        elastic=(1, run.replicas),
        nproc_per_replica=run.processes,
        lighthouse=lighthouse,
        slow=run.slow,
        timeout=str(run.timeout_seconds),
    )
    place = {"SLOT": slot, "REPLICA_GROUP_ID": slot, "RANK": rank if run.split else slot, "WORLD_SIZE": run.processes}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RUST_LOG": "error", "GLOO_SOCKET_IFNAME": "lo"}
    return settings.to_environment() | {name: str(value) for name, value in place.items()}


def faults_of(run, slot, life):
    """The step and the fault of this life of a replica, if it has any."""
    return sorted((step, fault) for (each, step), fault in run.faults.items() if each == slot)[life : life + 1]


def due(faults, step):
    """The fault of these that is due in this step, or nothing."""
    fault = next((fault for at, fault in faults if step >= at), "")
    if fault == "nan once":
        faults.clear()
    return fault


def replica(run, slot, life, rank, port, lighthouse, all_here, coming, folder):
    """One process of a replica."""
    import torch

    import evenstep
    from evenstep.core.errors import EvenstepError

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    warnings.showwarning = lambda message, *_: Path(folder, f"{slot}-{life}.warning").write_text(f"{message}")
    other = [given for process, given in run.other.items() if process == (slot, life)]
    os.environ.update(environment_of(run, slot, rank, port, lighthouse))
    reads = Path(folder, f"{slot}-{life}.reads") if run.num_workers else None
    model, optimizer, loader = parts(run, other, reads)
    model, optimizer, weights, told = split(run, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, run.decay)
    whole = run.global_batch_size or None
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, global_batch_size=whole, schedulers=scheduler, **run.options, **told
    )
    saved = (model, optimizer, scheduler, loader)
    restore(run, rank, saved)
    name = f"{slot}-{life}" + (f"-{rank}" if rank else "")
    mine = [each for each in faults_of(run, slot, life) if rank == run.processes - 1 or each[1] == "nan"]
    if life == 0:
        all_here.wait(GUARD_SECONDS)
    if (slot, life) in coming:
        coming[slot, life].set()
    try:
        first = loader.epoch
    except EvenstepError as error:
        Path(folder, f"{name}.error").write_text(str(error), encoding="utf-8")
        raise
    session = loader.session
    with (
        Path(folder, f"{name}.jsonl").open("w", encoding="utf-8") as log,
        counting(session, write(log)) as pending,
    ):
        for epoch in range(first, run.epochs):
            for inputs, targets in loader:
                step = session.step
                fault = due(mine, step) if len(pending) >= run.late else ""
                loss = train(run, fault, model, optimizer, loader, inputs, targets)
                scheduler.step()
                line = {"step": step, "epoch": epoch, "sizes": loader.batch_sizes}
                line |= {"slot": slot, "life": life, "rank": rank}
                line |= {"positions": list(loader.newest.positions[: loader.newest.samples]), "at": time.time()}
                line |= {"loss": loss, "nan": fault.startswith("nan"), "iteration": loader.newest.iteration}
                if run.local:
                    pending.append(line)
                elif session.counted:
                    write(log)(line, counts=True)
                if loader.session.step == run.until:
                    return save(run, slot, rank, saved)
                for process in run.waits.get(loader.session.step, ()):
                    assert process == (slot, life) or coming[process].wait(GUARD_SECONDS)
    Path(folder, f"{name}.weights").write_text(json.dumps(weights().tolist()), encoding="utf-8")


def split(run, model, optimizer):
    """The model, split over the processes of a replica; its optimizer, its whole weights, and what evenstep is told."""
    import torch

    from support import meshes

    if not run.split:
        return model, optimizer, partial(meshes.whole, list(model.parameters())), {}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=GUARD_SECONDS))
    mesh = meshes.mesh_of(run.split)
    model = meshes.model_on(mesh, run, model)
    weights = partial(meshes.whole, list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=run.momentum)
    return model, optimizer, weights, {"mesh": mesh, "data_dims": tuple({"shard"} & {*run.split})}


@contextmanager
def counting(session, settle):
    """A list of the lines of a period; `settle` is called with each, and whether it counts, when that is known."""
    pending, commit = [], session._quorum.commit

    def committed():
        counts = commit()
        for line in pending:
            settle(line, counts)
        pending.clear()
        return counts

    session._quorum.commit = committed
    yield pending


def write(log):
    """Write what counts."""
    return lambda line, counts: counts and print(json.dumps(line), file=log, flush=True)


def train(run, fault, model, optimizer, loader, inputs, targets):
    """One step, or a part of it; returns the mean loss of all members if the script measures it."""
    import torch

    fail(fault)
    optimizer.zero_grad()
    outputs = model(inputs)
    if fault == "kill in backward":
        outputs.register_hook(lambda _: fail("kill"))
    loss = torch.nn.functional.mse_loss(outputs, targets)
    if run.habit == "units":
        loader.weigh_by(loader.current.samples)
    elif run.habit == "no units":
        loader.weigh_by(0)
    (loss * torch.nan if fault.startswith("nan") else loss).backward()
    if fault == "kill before step":
        fail("kill")
    optimizer.step()
    if fault == "kill after step":
        fail("kill")
    return loader.mean_over_workers(loss.item(), loader.current.samples) if run.habit == "units" else None


def restore(run, rank, parts):
    import torch

    if run.checkpoint and run.until < 0:
        for part, state in zip(parts, torch.load(f"{run.checkpoint}{rank}", weights_only=False), strict=True):
            part.load_state_dict(state)


def save(run, slot, rank, parts):
    import torch

    parts[-1].settle()
    if slot == 0:
        torch.save([part.state_dict() for part in parts], f"{run.checkpoint}{rank}")


def fail(fault):
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "raise":
        raise RuntimeError("a fault of the script")


class Running:
    """The processes that run. A replica of which one fails is started again, `left[slot]` times.

    `common`: what each process is given besides its place.
    """

    def __init__(self, run, left, exits, common):
        self.run, self.left, self.exits, self.common = run, left, exits, common
        self.processes: dict[Any, tuple[int, int, Any]] = {}
        for slot in range(run.replicas):
            self.start(slot, 0)

    def start(self, slot, life):
        port = free_port()
        for rank in range(self.run.processes):
            process = CONTEXT.Process(target=replica, args=(self.run, slot, life, rank, port, *self.common))
            process.start()
            self.processes[process.sentinel] = slot, life, process

    def ended(self, sentinel):
        slot, life, process = self.processes.pop(sentinel, (0, 0, None))
        if process is None:  # It was killed with another one of its replica.
            return
        process.join()
        self.exits.append((slot, life, process.exitcode))
        if process.exitcode:
            self.kill(slot)
            if self.left.get(slot):
                self.left[slot] -= 1
                self.start(slot, life + 1)

    def kill(self, *slots):
        for sentinel, (slot, _, process) in list(self.processes.items()):
            if slot in slots:
                del self.processes[sentinel]
                process.kill()
                process.join()


def run_replicas(run, *, restarts=1) -> Outcome:
    """Start the replicas, and each one that fails again; kill those that have stopped once all others have ended.

    `restarts`: the most of each replica, or by replica.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    coming = {process: CONTEXT.Event() for waited in run.waits.values() for process in waited}
    all_here = CONTEXT.Barrier(run.replicas * run.processes)
    outcome, deadline = Outcome(), time.monotonic() + GUARD_SECONDS
    left = dict.fromkeys(range(run.replicas), restarts) if isinstance(restarts, int) else dict(restarts)
    stopped = {slot for (slot, _), fault in run.faults.items() if fault == "stop"}
    with tempfile.TemporaryDirectory() as folder:
        running = Running(run, left, outcome.exits, (address, all_here, coming, folder))
        try:
            while here := {(slot, life) for slot, life, _ in running.processes.values() if slot not in stopped}:
                wait = max(0.0, deadline - time.monotonic())
                ready = multiprocessing.connection.wait(list(running.processes), wait)
                assert ready, f"replicas {here} did not finish in time"
                for sentinel in ready:
                    running.ended(sentinel)
        finally:
            running.kill(*range(run.replicas))
            lighthouse.shutdown()
        read_files(Path(folder), outcome)
    return outcome


def read_files(folder, outcome):
    """Take in what the processes left."""
    texts = {file: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    for file, text in texts.items():
        if file.suffix == ".weights":
            outcome.weights[file.stem] = json.loads(text)
        elif file.suffix == ".error":
            outcome.errors[file.stem] = text
        elif file.suffix == ".reads":
            outcome.reads[file.stem] = [*map(int, text.splitlines())]
        elif file.suffix == ".warning":
            outcome.warnings.append(text)
        else:
            outcome.steps += [json.loads(line) for line in text.splitlines()]

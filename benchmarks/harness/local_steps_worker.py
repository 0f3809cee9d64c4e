"""One worker of `local_steps.py`: trains one of its tasks, under a scheme of evenstep or torchft's DiLoCo.

Its steps take as long as they are told to, by a sleep in the forward pass. Rank 0 copies the model where all workers
have (or have just received) it, and evaluates the copies when the run is over.
"""

import argparse
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evenstep
from harness.tasks import LETTERS, letters_of_help
from harness.tasks import letters as letters_task

CONTEXT = 32
TESTED = 256
"""Windows of text that are kept for evaluation."""


class Transformer(torch.nn.Module):
    """The scores of each next letter, `(samples, letters, CONTEXT)`."""

    def __init__(self, width):
        super().__init__()
        self.letters = torch.nn.Embedding(len(LETTERS), width)
        self.places = torch.nn.Embedding(CONTEXT, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = torch.nn.Linear(width, len(LETTERS))

    def forward(self, texts):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.letters(texts) + self.places(torch.arange(CONTEXT))
        return self.scores(self.layers(hidden, mask=mask, is_causal=True)).transpose(1, 2)


def large(samples, width=448):
    """A transformer of 9.7 million parameters, the samples to train on, and those to evaluate."""
    codes = torch.from_numpy(letters_of_help()[0])
    windows = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    train, test = windows[TESTED:], windows[:TESTED]
    train = train.repeat(math.ceil(samples / len(train)), 1)[:samples]
    return Transformer(width), *(TensorDataset(each[:, :-1], each[:, 1:]) for each in (train, test))


def letters(samples):
    """A network of one hidden layer, with 0.1 million parameters, for the next letter after two."""
    task = letters_task(samples=samples, hidden=1024)
    return task.network(), TensorDataset(*task.train), TensorDataset(*task.test)


class Pace:
    """Makes a step take `seconds` for each sample, times the `slowness` of the moment, with what the step computes."""

    def __init__(self, seconds, slowness):
        self.seconds, self.slowness = seconds, slowness
        self._computed = time.thread_time()

    def hold(self, samples):
        """Sleep for what the last step has not computed."""
        computed = time.thread_time() - self._computed
        time.sleep(max(0.0, samples * self.seconds * self.slowness() - computed))
        self._computed = time.thread_time()


TASKS = {"large": large, "letters": letters}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", help="a scheme, or `torchft`")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a worker")
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--outer-momentum", type=float, required=True, help="of torchft's outer optimizer")
    parser.add_argument("--seconds", type=float, required=True, help="of a sample, where nothing is slow")
    parser.add_argument(
        "--slowness", required=True, help="of each worker, as 1:1:2:4; 4/10 is slow in every other 10 s"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rank = int(os.environ["RANK"])
    model, train, test = TASKS[options.task](options.samples)
    pace = Pace(options.seconds, _slowness(options.slowness.split(":")[rank]))
    model.register_forward_pre_hook(lambda model, given: pace.hold(len(given[0])) if model.training else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    loop = with_torchft if options.contestant == "torchft" else with_evenstep
    copies = []
    began, sent = None, 0
    for module, due in loop(model, optimizer, train, options):
        if began is None:  # The first step connects the workers.
            began, sent = time.monotonic(), _sent_bytes()
        if rank == 0 and due:
            state = {name: value.clone() for name, value in module.state_dict().items()}
            copies.append((time.monotonic() - began, state))
    ended = time.monotonic() - began
    told = {"seconds": ended, "sent": _sent_bytes() - sent, "parameters": sum(p.numel() for p in model.parameters())}
    if rank == 0:
        torch.set_num_threads(os.cpu_count())
        told["curve"] = [[at, _evaluated(model, state, test)] for at, state in copies]
    (options.out / f"{rank}.json").write_text(json.dumps(told))


def with_evenstep(model, optimizer, dataset, options):
    """After every step the bare model, and whether it is the common one; at the end the final one.

    Models are averaged when the next batch is asked for.
    """
    whole, managed, loader = evenstep.prepare(
        model, optimizer, DataLoader(dataset, batch_size=options.batch, shuffle=True), scheme=options.contestant,
        seed=options.seed, timeout=300.0,
    )  # fmt: skip
    own_steps = "steps=speed" in options.contestant or options.contestant.startswith("asp")
    averaged = None
    for step, (inputs, truth) in enumerate(loader, 1):
        if averaged is not None:
            yield model, averaged
        averaged = loader.synchronises if own_steps else step % options.period == 0
        managed.zero_grad()
        functional.cross_entropy(whole(inputs), truth).backward()
        managed.step()
    loader.close()
    yield model, True


def with_torchft(model, optimizer, dataset, options):
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, file = os.environ["HOST_ADDRESS"], options.out / "lighthouse"
    if rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=workers, join_timeout_ms=60_000)
        file.with_suffix(".new").write_text(f"http://{address}:{lighthouse.address().rpartition(':')[2]}")
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.05)
    timeout = timedelta(seconds=300)
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=workers, use_async_quorum=False, timeout=timeout, quorum_timeout=timeout, rank=0, world_size=1,
        store_addr=address, store_port=store.port, lighthouse_addr=file.read_text(), replica_id=str(rank),
        hostname=address, init_sync=False,  # All begin alike, from the seed.
    )  # fmt: skip
    sampler = DistributedSampler(dataset, workers, rank, seed=options.seed)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=options.outer_momentum, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=options.period):
        for step, (inputs, truth) in enumerate(DataLoader(dataset, batch_size=options.batch, sampler=sampler), 1):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), truth).backward()
            optimizer.step()
            yield model, step % options.period == 0
    _all_done(options.out, rank, workers)
    manager.shutdown(wait=False)


def _all_done(folder, rank, workers):
    """Wait for all, since rank 0 serves them."""
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < workers:
        time.sleep(0.05)


def _slowness(text):
    """A function that gives a worker's slowness at any time; `4/10` is 4 and 1 by turns of 10 s."""
    factor, _, turn = text.partition("/")
    if not turn:
        return lambda: float(factor)
    began = time.monotonic()
    return lambda: float(factor) if (time.monotonic() - began) // float(turn) % 2 else 1.0


def _evaluated(model, state, test):
    model.load_state_dict(state)
    model.eval()
    inputs, truth = test.tensors
    with torch.no_grad():
        return float(functional.cross_entropy(model(inputs), truth))


def _sent_bytes():
    """What this host has sent over the cable."""
    path = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    return int(path.read_text())


if __name__ == "__main__":
    main()

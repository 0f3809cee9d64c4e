"""evenstep itself: its server process, and workers that exchange as its engine has them exchange, under asp with SGD.

A worker's exchange is what `optimizer.step()` does beside its bookkeeping: put the gradients where they are sent from
and take their norm, push and wait for the answer, take the weights. Every answer has the weights of one version. One
contestant does all that a script does, except to compute: it takes a batch from the loader, and steps.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness.reports import row
from harness.serving import served
from harness.workers import run_workers
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from contestants.case import LEARNING_RATE, Measured
from contestants.models import parameter_sizes
from contestants.timing import timed
from evenstep.core.values import UNLIMITED, Problem
from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers
from evenstep.protocol.messages import Begin, Initialise, PushGradients, SendWeights
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.torch.engines.describe import describe, layout_of
from evenstep.torch.engines.served_parameters import ServedParameters
from evenstep.transport.connect import connect
from evenstep.worker.servers.link import ServerLink

SCHEME = "asp:rate=raw"
"""At the optimizer's own rate, so that the weights tell how many updates they have seen."""
_LENGTH = 10**9
_SAMPLES = 10**6
"""Of an epoch that does not end before the measurement does."""
_TIMEOUT_SECONDS = 60.0


def over_network(case):
    """Over TCP on the loopback interface, as between hosts of a trusted network."""
    return _measure(case, "tcp:")


def over_shared_memory(case):
    """As workers find their server on one host: a Unix socket for words, shared memory for tensors."""
    return _measure(case, "unix:")


def in_a_script(case):
    """By shared memory, through `evenstep.prepare`: a batch of the loader and `optimizer.step()`, without compute."""
    return run_workers(case.workers, _train, case, show=lambda text: None)


def _measure(case, kind):
    # Described here: an optimizer's first import takes seconds, which every worker would need again.
    parameters = model(case.elements)
    run = run_of(parameters, torch.optim.SGD(parameters.values(), lr=LEARNING_RATE), case.workers)
    with (
        tempfile.TemporaryDirectory() as folder,
        Servers(
            ServerSettings(count=1, workers=case.workers, snapshots=Path(folder) / "snapshots"), _refuse
        ) as servers,
    ):
        addresses = [address for address in servers.addresses[0] if address.startswith(kind)]
        return run_workers(case.workers, _work, (case, run, addresses, servers.secret), show=lambda text: None)


def _refuse(event):
    raise RuntimeError(f"the server did not serve the whole time: {event.text}")


def model(elements):
    """Parameters by name, zeros, as ps-lite's model keys have them."""
    return {
        f"parameter{number}": torch.nn.Parameter(torch.zeros(size))
        for number, size in enumerate(parameter_sizes(elements))
    }


def run_of(parameters, optimizer, workers):
    """What the server is told of a run; each exchange is of one sample, and the epoch does not end."""
    return RunSpec(
        scheme=parse_scheme(SCHEME),
        problem=Problem(
            global_batch_size=workers,
            minimum=np.ones(workers, dtype=np.int64),
            maximum=np.full(workers, UNLIMITED, dtype=np.int64),
        ),
        length=_LENGTH,
        drop_last=False,
        layout=layout_of(parameters.items(), [optimizer]),
        optimizers=(describe(optimizer),),
    )


class Worker:
    """One worker's place at the server: begun, and ready to exchange gradients of ones for weights.

    `parameters` begin as the servers' weights where this worker is the first one there.
    """

    def __init__(self, rank, run, parameters, addresses, secret):
        layouts = run.layout.shards(1)
        secret = bytes.fromhex(secret)
        self._link = ServerLink(
            rank, lambda shard: connect(addresses, secret=secret), 1, timeout_seconds=_TIMEOUT_SECONDS
        )
        self._link.start(run.encode(), [each.nbytes for each in layouts])
        self._parameters = ServedParameters(parameters, layouts, self._link, waits=True)
        self._parameters.view()
        self._row = tuple(row(samples=1, seconds=1e-3))
        self._options = run.optimizers[0].groups
        self._answer = self._begin()
        if isinstance(self._answer.body, SendWeights):
            self._parameters.put_weights()
            self._link.ask(Initialise(), gradients=True)
            self._answer = self._begin()
        self._parameters.take_weights()
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)

    @property
    def version(self):
        """Of the weights that came last: how many updates they have seen."""
        return self._answer.version

    def exchange(self):
        """Push, and pull."""
        norm = self._parameters.put_gradients()
        push = PushGradients(
            claim=self._answer.body.claims[0][0],
            weights=self.version,
            samples=1,
            units=1,
            row=self._row,
            norm=norm,
            options=self._options,
        )
        self._answer = self._link.ask(push, gradients=True)
        self._options = None  # Which are sent when they have changed.
        self._parameters.take_weights()

    def close(self):
        """Say goodbye."""
        self._link.close()

    def _begin(self):
        return self._link.ask(Begin(number=0, epoch=0, ahead=0))


def _train(rank, case, tell):
    with tempfile.TemporaryDirectory() as folder, served(SCHEME, folder):
        measured = _trained(rank, case)
    return measured


def _trained(rank, case):
    module = torch.nn.Module()
    for name, parameter in model(case.elements).items():
        module.register_parameter(name, parameter)
        parameter.grad = torch.ones_like(parameter)
    source = DataLoader(TensorDataset(torch.zeros(1).expand(_SAMPLES)), batch_size=1)
    module, optimizer, loader = evenstep.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
        source,
        scheme=SCHEME,
        global_batch_size=case.workers,
    )
    batches, counted = iter(loader), itertools.count()

    def exchange():
        next(batches)
        optimizer.step()
        next(counted)

    result = timed(case, exchange, dist.barrier)
    seen = {float(end) / -LEARNING_RATE for each in module.parameters() for end in each.detach().aminmax()}
    if len(seen) != 1:
        raise RuntimeError(f"the weights are as after {min(seen):g} to {max(seen):g} updates")
    results = [None] * case.workers
    dist.all_gather_object(results, (result, next(counted), seen.pop()))
    batches.close()
    loader.close()
    return _checked(results)


def _work(rank, plan, tell):
    case, run, addresses, secret = plan
    parameters = model(case.elements)
    worker = Worker(rank, run, parameters, addresses, secret)
    counted = itertools.count()

    def exchange():
        worker.exchange()
        next(counted)

    result = timed(case, exchange, dist.barrier)
    seen = {float(end) / -LEARNING_RATE for each in parameters.values() for end in each.detach().aminmax()}
    if seen != {worker.version}:
        raise RuntimeError(f"weights of version {worker.version} are as after {min(seen):g} to {max(seen):g} updates")
    results = [None] * case.workers
    dist.all_gather_object(results, (result, next(counted), worker.version))
    worker.close()
    return _checked(results)


def _checked(results):
    """What all workers measured; each gives its part, its exchanges, and how many updates its weights have seen."""
    exchanges = sum(done for _, done, _ in results)
    if max(version for _, _, version in results) != exchanges:
        raise RuntimeError(f"{exchanges} exchanges were not as many updates")
    return Measured(workers=tuple(one for one, _, _ in results), details={"checked_updates": exchanges})

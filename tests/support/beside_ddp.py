"""Training on hosts, in evenstep's process group or by a communication hook."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.torch.model import _REDUCTIONS
from support import training


def train_beside_ddp(run):
    """Whether bsp's gradients have the bits of plain DDP's on the same batches, and are summed in the group."""
    model, optimizer, loader = training.prepared(run, DistributedDataParallel(training.model_of(run)))
    plain = DistributedDataParallel(training.model_of(run))
    steps = training.optimizer_of(run, plain)
    evenstep.torch.leave_alone(steps)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        training.step(plain, steps, inputs, targets)
    return {
        "in_group": any(each.group is not None for each in _REDUCTIONS.values()),
        "equal": training.weights(model) == training.weights(plain),
    }


def prepare_again(run):
    """Train a DDP model in three sessions, the second with a hook; and one in one process on all batches.

    A layer is frozen in the first, as for fine-tuning.
    """
    model = DistributedDataParallel(training.model_of(run))
    calls = []

    def counted(state, bucket):
        calls.append(bucket.index())
        return allreduce_hook(None, bucket)

    expected = training.model_of(run)
    own = training.optimizer_of(run, expected)
    evenstep.torch.leave_alone(own)
    for comm_hook in (None, (None, counted), None):
        for each in (model.module, expected):
            each[2].requires_grad_(len(calls) > 0 or comm_hook is not None)
        optimizer = training.optimizer_of(run, model)
        data = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
        prepared, optimizer, loader = evenstep.prepare(model, optimizer, data, scheme="bsp", comm_hook=comm_hook)
        own = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
        evenstep.torch.leave_alone(own)
        for inputs, targets in loader:
            training.step(prepared, optimizer, inputs, targets)
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (inputs, targets))
            training.step(expected, own, *map(torch.cat, zip(*parts, strict=True)))
        try:
            model.register_comm_hook(None, counted)
            refused = ""
        except evenstep.ConfigError as error:
            refused = str(error)
        loader.close()
    close = torch.allclose(*(torch.tensor(training.weights(each)) for each in (model, expected)), rtol=0, atol=1e-14)
    return {"close": close, "hook_calls": len(calls), "refused": refused}


def nest(run):
    """The sentence that refuses a DDP within the model, which would divide gradients, too."""
    inner = DistributedDataParallel(training.model_of(run), gradient_as_bucket_view=True)
    try:
        training.prepared(run, torch.nn.Sequential(inner))
    except evenstep.ConfigError as error:
        return str(error)


def train_complex(run):
    """How far apart are weights, some of them complex, and those of one process on all batches."""

    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.layers, self.turn = training.model_of(run), torch.nn.Parameter(torch.randn(1, dtype=torch.complex128))

        def forward(self, inputs):
            return (self.layers(inputs) * self.turn).real

    expected = Turned()
    own = training.optimizer_of(run, expected)
    evenstep.torch.leave_alone(own)
    model, optimizer, loader = training.prepared(run, Turned())
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (inputs, targets))
        training.step(expected, own, *map(torch.cat, zip(*parts, strict=True)))
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)

"""Where to weigh gradients: in every bucket, by a communication hook, or where they enter the model, at its outputs.

Real compute, two workers with 24 and 8 samples. The ways take turns iteration by iteration on copies of one model:

* `plain`: DistributedDataParallel without weights, the cost to compare with
* `buckets`: a communication hook multiplies each bucket and sums it, as evenstep's does
* `outputs`: a hook on the outputs multiplies their gradient, and DistributedDataParallel averages
* `outputs, end noted`: as `outputs`, with a hook on every parameter that notes when the last gradient is complete,
  since a balancer has to know when compute ended

The second table compares the gradients of either way with those of one process on the union of both batches, for
models that are not one call with one output.
"""

import copy
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES = (24, 8)
FEATURES = 6


def main():
    parser = record.arguments(__doc__)
    options = parser.parse_args()
    iterations = 6 if options.quick else 60
    cases = run_workers(len(SIZES), _measure, (iterations, options.seed), show=record.console.print)
    figures = [
        record.figure(f"{model}: {way}, times plain", _ratios(times[way], times["plain"]))
        for model, times in cases["seconds"].items()
        for way in WAYS
        if way != "plain"
    ]
    rows = [(habit, *(f"{off:.1g}" for off in each.values())) for habit, each in cases["off"].items()]
    done = record.publish(
        "weigh_where",
        "Seconds of an iteration with weighted gradients, in terms of plain DistributedDataParallel's",
        options,
        config={"iterations": iterations, "batch_sizes": list(SIZES)},
        figures=figures,
        raw=cases,
        tables=[record.table("Largest error of a gradient", ("model", "buckets", "outputs"), rows)],
    )
    return 0 if done else 1


def _ratios(seconds, plain, pieces=5):
    """Ratios of medians, one for each stretch of iterations."""
    length = len(plain) // pieces
    stretches = [slice(n * length, (n + 1) * length) for n in range(pieces)]
    return [median(seconds[each]) / median(plain[each]) for each in stretches]


# The ways.


def _hook_buckets(model, weight, _):
    def hook(_, bucket):
        reduced = dist.all_reduce(bucket.buffer().mul_(weight), async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    return lambda outputs: outputs


def _hook_outputs(_, weight, workers):
    factor = workers * weight

    def weighed(outputs):
        for each in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(each, torch.Tensor):
                each.register_hook(lambda gradient: gradient * factor)
        return outputs

    return weighed


def _hook_outputs_and_end(model, weight, workers):
    parameters, ended = list(model.parameters()), [0, 0.0]

    def count(_):
        ended[0] += 1
        if ended[0] % len(parameters) == 0:
            ended[1] = time.perf_counter()

    for each in parameters:
        each.register_post_accumulate_grad_hook(count)
    return _hook_outputs(model, weight, workers)


def _hook_nothing(*_):
    return lambda outputs: outputs


WAYS = {
    "plain": _hook_nothing,
    "buckets": _hook_buckets,
    "outputs": _hook_outputs,
    "outputs, end noted": _hook_outputs_and_end,
}


# The cost.


def _models():
    convolutions = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(128, 10),
    )
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return {
        "convolutions, 0.1 M parameters": (convolutions, (3, 32, 32)),
        "transformer, 1.2 M parameters": (nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (32, 128)),
        "wide perceptron, 9.4 M parameters": (
            nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1280)),
            (1024,),
        ),
    }


def _measure(rank, plan, tell):
    iterations, seed = plan
    seconds = {}
    for name, (model, shape) in _models().items():
        torch.manual_seed(seed)
        inputs = torch.randn(SIZES[rank], *shape)
        seconds[name] = _times(model, inputs, rank, iterations)
        tell(f"  {name}: " + ", ".join(f"{way} {1e3 * median(each):.1f} ms" for way, each in seconds[name].items()))
    return {"seconds": seconds, "off": {habit.__name__.replace("_", " "): _off(habit, rank, seed) for habit in HABITS}}


def _times(model, inputs, rank, iterations):
    ways = {}
    for way, hook in WAYS.items():
        replica = DistributedDataParallel(copy.deepcopy(model))
        ways[way] = replica, hook(replica, SIZES[rank] / sum(SIZES), len(SIZES))
    times = {way: [] for way in ways}
    for iteration in range(iterations + 5):
        for way, (replica, weighed) in ways.items():
            replica.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            weighed(replica(inputs)).square().mean().backward()
            if iteration >= 5:
                times[way].append(time.perf_counter() - began)
    return times


# The gradients.


def one_output(model, inputs):
    return model(inputs).square().mean()


def outputs_in_an_object(model, inputs):
    return model(inputs, boxed=True).value.square().mean()


def gradient_penalty(model, inputs):
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs.square().mean() + slopes.square().sum(1).mean()


def a_model_after_itself(model, inputs):
    return model(model(inputs)).square().mean()


HABITS = (one_output, outputs_in_an_object, gradient_penalty, a_model_after_itself)


@dataclass(eq=False)
class _Box:
    """An object that PyTorch does not look into."""

    value: torch.Tensor


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES)).double()

    def forward(self, inputs, boxed=False):
        outputs = self.layers(inputs)
        return _Box(outputs) if boxed else outputs


def _off(habit, rank, seed):
    """The largest difference of a gradient from that of one process, by way."""
    torch.manual_seed(seed)
    model, inputs = _Model(), torch.randn(sum(SIZES), FEATURES, dtype=torch.float64)
    alone = copy.deepcopy(model)
    habit(alone, inputs).backward()
    own, off = inputs.split(SIZES)[rank], {}
    for way in ("buckets", "outputs"):
        replica = DistributedDataParallel(copy.deepcopy(model))
        weighed = WAYS[way](replica, SIZES[rank] / sum(SIZES), len(SIZES))
        habit(lambda *args, call=replica, weighed=weighed, **options: weighed(call(*args, **options)), own).backward()
        pairs = zip(replica.parameters(), alone.parameters(), strict=True)
        off[way] = max(float((one.grad - other.grad).abs().max()) for one, other in pairs)
    return off


if __name__ == "__main__":
    sys.exit(main())

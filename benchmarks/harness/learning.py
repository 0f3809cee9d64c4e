"""One run of real training on emulated devices, with what is learnt over time: accuracy by emulated seconds.

The fastest worker, which is the last, copies the weights it has after each of its steps; they are evaluated when the
run is over, so that evaluating takes no time. Between two averages of local SGD these are that worker's own.
"""

import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import Cluster
from evenstep.telemetry import read_events
from harness import serving

ORDINARY = ("iteration", "run", "plan")
"""Events of workers that say nothing unusual."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to train.

    Attributes:
        optimizer: Makes the optimizer of parameters.
        rate: Of global samples handed out before, and of this worker's own, the factor of the learning rate.
        passes: In one pass over the data repeated so often, there is no barrier at the ends of epochs.
        copy_every: Steps of the fastest worker between two copies of its weights.
    """

    scheme: str
    seed: int
    optimizer: object
    cluster: Cluster
    global_batch_size: int
    epochs: int
    passes: int = 1
    rate: object = None
    copy_every: int = 1


def train(run, task, folder):
    """On every worker: the run, in an empty folder of its own; on rank 0, what came of it, as a dict."""
    torch.manual_seed(run.seed)
    model = task.network()
    given = run.optimizer(model.parameters())
    base = [group["lr"] for group in given.param_groups]
    with warnings.catch_warnings(record=True) as caught, serving.served(run.scheme, folder):
        warnings.simplefilter("always")
        model, optimizer, loader = evenstep.prepare(
            model, given, _loader(run, task), scheme=run.scheme, global_batch_size=run.global_batch_size,
            seed=run.seed, emulate=run.cluster, run_dir=folder,
        )  # fmt: skip
        copies, own, steps, copying = [], 0, 0, dist.get_rank() == dist.get_world_size() - 1
        dist.barrier()
        began = time.perf_counter()
        for _ in range(run.epochs):
            for inputs, truth in loader:
                if run.rate is not None:
                    for group, rate in zip(optimizer.param_groups, base, strict=True):
                        group["lr"] = rate * run.rate(min(loader.current.positions), own)
                loss = cross_entropy(model(inputs), truth)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                own += loader.current.samples
                steps += 1
                if copying and steps % run.copy_every == 0:
                    copies.append((time.perf_counter() - began, own, _copy(model.module)))
        ended = time.perf_counter() - began
        final = _copy(model.module)
        statistics = loader.statistics()
        dist.barrier()
        # A script prepares once and ends; here the threads of one run must not run on in the next.
        loader.close()
    return _gathered(
        {
            "ended": ended,
            "samples": own,
            "iterations": steps,
            "overruns": statistics.overruns,
            "skipped_pushes": statistics.skipped,
            "warnings": sorted({str(each.message) for each in caught}),
            "weights": final,
            "curve": [[seconds, mine, evaluate(task.test, weights)[1]] for seconds, mine, weights in copies],
        },
        run, task, folder,
    )  # fmt: skip


def _loader(run, task):
    if run.passes == 1:
        return DataLoader(TensorDataset(*task.train), batch_size=1, shuffle=True, drop_last=True)
    generator = torch.Generator().manual_seed(run.seed)
    order = torch.cat([torch.randperm(len(task.train[1]), generator=generator) for _ in range(run.passes)])
    return DataLoader(TensorDataset(*(part[order] for part in task.train)), batch_size=1, drop_last=True)


def _copy(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def evaluate(data, weights):
    """Loss and accuracy of a network of one hidden layer."""
    hidden, hidden_bias, output, output_bias = weights
    with torch.no_grad():
        scores = torch.relu(data[0] @ hidden.T + hidden_bias) @ output.T + output_bias
    return float(cross_entropy(scores, data[1])), float((scores.argmax(dim=1) == data[1]).double().mean())


def _gathered(told, run, task, folder):
    """On rank 0, one record from what all workers saw; None on the others."""
    everybody = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(told, everybody)
    if everybody is None:
        return None
    weights = everybody[0]["weights"]
    apart = max(float((a - b).abs().max()) for each in everybody for a, b in zip(each["weights"], weights, strict=True))
    loss, accuracy = evaluate(task.train, weights)[0], evaluate(task.test, weights)[1]
    return {
        "scheme": run.scheme,
        "seed": run.seed,
        "seconds": max(each["ended"] for each in everybody),
        "samples": sum(each["samples"] for each in everybody),
        "samples_by_worker": [each["samples"] for each in everybody],
        "iterations_by_worker": [each["iterations"] for each in everybody],
        "overruns_by_worker": [each["overruns"] for each in everybody],
        "accuracy": accuracy,
        "training_loss": loss,
        # A guess that knows nothing has the logarithm of the classes; `not <` is true of NaN as well.
        "diverged": not loss < float(torch.tensor(task.classes).log()),
        "weights_apart": apart,
        "skipped_pushes": sum(each["skipped_pushes"] for each in everybody),
        "warnings": sorted({text for each in everybody for text in each["warnings"]}),
        **_events(Path(folder)),
        "curve": [[round(seconds, 4), own, round(value, 4)] for seconds, own, value in everybody[-1]["curve"]],
    }


def _events(folder):
    """Mean staleness of the pushes in global batches, each worker's compute, the groups, and what else was written."""
    own, servers = list(read_events(folder)), list(read_events(folder, role="server"))
    events, compute = [*own, *servers], Counter()
    for event in own:
        compute[event.worker] += event.compute_seconds if event.kind == "iteration" else 0.0
    staleness = [event.behind for event in own if event.kind == "iteration" and event.behind is not None]
    return {
        "mean_staleness": fmean(staleness) if staleness else 0.0,
        "compute_by_worker": [compute[worker] for worker in sorted(compute)],
        "groups": [event.groups for event in servers if event.kind == "regroup"],
        "events": dict(Counter(event.kind for event in events if event.kind not in ORDINARY)),
    }


def seconds_to(run, accuracy, held=1):
    """Emulated seconds until so many evaluations in a row began to be all this accurate; None where none did."""
    values = [value for _, _, value in run["curve"]]
    for first in range(len(values) - held + 1):
        if min(values[first : first + held]) >= accuracy:
            return run["curve"][first][0]
    return None


def overrun_share(run):
    """The part of all workers' iterations in which real work took longer than the emulated time."""
    return sum(run["overruns_by_worker"]) / sum(run["iterations_by_worker"])


def overruns(run):
    """As `harness.record` counts them, over all workers' iterations."""
    return {"overrun_iterations": sum(run["overruns_by_worker"]), "iterations": sum(run["iterations_by_worker"])}

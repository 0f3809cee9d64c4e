"""The one line that a user adds to a script."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.cluster import Cluster
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.torch.costs import Cost
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.engines.weighting import Weights
from evenstep.torch.session import Session

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...])


def prepare(
    model: torch.nn.Module | tuple[torch.nn.Module, ...],
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    scheme: Scheme | str | None = None,
    global_batch_size: int | Literal["auto"] | None = None,
    batch_sizes: Sequence[int] | Mapping[Any, int] | None = None,
    seed: int = 0,
    timeout: float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    comm_hook: CommHook | None = None,
    emulate: Cluster | str | os.PathLike[str] | None = None,
    schedulers: LRScheduler | Sequence[LRScheduler] | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] = (),
    empty: Literal["copy", "shrink"] = "copy",
    partition: Literal["common", "private"] | None = None,
    uneven: Literal["continue", "stop"] = "continue",
    weights: Weights = "samples",
    accumulation: int = 1,
    cost: Cost | None = None,
) -> tuple[Any, Optimizer, PreparedLoader]:
    """Prepare an ordinary training loop to run under a scheme. All workers call this together, once.

    Arguments given here win over the environment (`EVENSTEP_SCHEME`, `EVENSTEP_BATCH_SIZES`, `EVENSTEP_RUN_DIR`,
    `EVENSTEP_EMULATE`, `EVENSTEP_TIMEOUT`, which `evenstep run` sets from its options), which wins over the defaults.
    Without torchrun or `evenstep run`, the script is a run of one worker.

        model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
        for inputs, targets in loader:  # in batches of this worker's size
            ...  # as before

    Args:
        model: The model, plain or in DistributedDataParallel, or a tuple of models.
        optimizer: Its optimizer, or a tuple of optimizers.
        loader: A DataLoader. As under DDP, its `batch_size` is for one worker: the global batch size is
            the product with the number of workers. Its sampler's shuffling, seed and `set_epoch` are respected. A
            `batch_sampler` of your own gives the global batches: each of its lists is divided among all workers.
        scheme: A `Scheme`, or a string such as `lb-bsp:multiple=8`. The default is `lb-bsp`.
        global_batch_size: Samples in one iteration over all workers, instead of the loader's. `auto`: the
            size that `evenstep plan` has measured with the same `run_dir`.
        batch_sizes: Fixed batch sizes, weighted correctly and never tuned: a list with one per worker, or a mapping
            from keys such as `rank:2`, `host:node7` and `gpu:NVIDIA GeForce RTX 3090`. If several keys match a worker,
            rank wins over host and host over gpu.
        seed: Seed for the order of the samples and for the random numbers of data workers. The seed of a
            DistributedSampler wins.
        timeout: Seconds to wait for another worker before the run ends with an error that names it. The default is 300.
        run_dir: Folder to which each worker writes its events, as JSON lines.
        comm_hook: `(state, hook)`, an averaging DDP communication hook, such as one that compresses gradients.
        emulate: A cluster, or the path of its TOML file, whose devices and disturbances are emulated.
        schedulers: The learning-rate schedulers of the optimizer. Only needed with `accumulation` or micro-batches:
            their `step` then does nothing before the last batch of an iteration.
        process_group: The process group whose members are the workers; not with parameter servers. The default is all
            processes.
        mesh: The device mesh of all processes, with names, if the model is split over several of them. Processes that
            differ only outside `data_dims` are then one worker, which gets one batch.
        data_dims: The dimensions of the mesh along which batches differ, such as `("dp",)`. With several, such as
            `("dp_replicate", "dp_shard")`, workers that differ only beyond the first get batches of the same size.
        empty: What a worker gets if the last slice of an epoch has too few samples for all. `copy`: a copy of another
            worker's sample, whose gradient does not count. `shrink`: every worker gets samples of its own, because a
            shorter last slice and the one before it then share their samples equally. On servers no worker gets copies
            of another worker's samples.
        partition: Who owns the samples. `common`: all workers have the same dataset. `private`: each worker has its own
            data, of any length, and takes its next samples as its size says; with `lb-bsp`, `dbs`, `bsp`,
            `batch_sizes` and `local-sgd`. An `IterableDataset` is always private; by default, other datasets are
            common. Unless it is given, workers compare a few samples first.
        uneven: What happens where one worker has no private samples left. `continue`: the others go on, and the epoch
            ends when all have none. `stop`: the epoch ends for all.
        weights: How workers' gradients are weighed. `samples`: by their samples, or as the scheme says. `script`: all
            equally, for a loss that the script itself has normalised over all workers, as it must under
            DistributedDataParallel.
        accumulation: How many of the loader's batches the script accumulates for a step, if it divides its loss by this
            number, as scripts do. Each worker then computes as many batches for a step as its speed allows, on average
            this many, and the gradient is that of the mean over them all. Step where `loader.synchronises`; elsewhere
            a step does nothing.
        cost: The cost of each sample, in any unit (tokens, pixels, seconds), if samples differ: an array with one
            number above 0 per dataset index, a function of an index, called once for each at the start, or the name of
            a field of the samples. Or `evenstep.Padded(lengths)`, if batches are padded to their longest sample.
            Workers' speeds then decide how much cost each gets, instead of how many samples; gradients count by samples
            as before. On parameter servers, claims are sized by cost.

    Returns:
        The model as a `PreparedModel`, which has yours in `.module` (for a tuple, a tuple of them), or your own
        DistributedDataParallel itself where gradients are summed; your optimizer, in a wrapper if batches accumulate or
        the scheme has parameter servers; and the loader, which hands out this worker's batches.

    Raises:
        ConfigError: A request cannot work. Raised on every worker, even if it is wrong on only one.
        DisagreementError: The workers were started with different schemes, versions or data.
        WorkerLostError: Not all workers came within the timeout; the message names the missing ones.
    """
    options: dict[str, Any] = {
        "scheme": scheme,
        "global_batch_size": global_batch_size,
        "batch_sizes": batch_sizes,
        "seed": seed,
        "run_dir": run_dir,
        "emulate": emulate,
        "process_group": process_group,
        "mesh": mesh,
        "data_dims": data_dims,
        "empty": empty,
        "partition": partition,
        "uneven": uneven,
        "weights": weights,
        "accumulation": accumulation,
    }
    launched = LaunchSettings.from_environment(os.environ)
    models, optimizers = _each(model), _each(optimizer)
    session: Any
    if launched.elastic is not None:
        from evenstep.torch.elastic.replica import session_of  # torchft is an extra.

        options |= {"comm_hook": comm_hook, "cost": cost}
        session, hooked, costs = session_of(models[0], launched, timeout, options), {}, {}
    else:
        session, hooked, costs = Session(timeout=timeout, **options), {"comm_hook": comm_hook}, {"cost": cost}
    prepared = tuple(session.model(each, **hooked) for each in models)
    stepping = tuple(session.optimizer(each) for each in optimizers)
    given = () if schedulers is None else tuple(schedulers) if isinstance(schedulers, list) else _each(schedulers)
    for scheduler in given:
        session.scheduler(scheduler)
    handing_out = session.loader(loader, **costs)
    if isinstance(session, Session):
        session.start()
    several, multiple = isinstance(model, tuple), isinstance(optimizer, tuple)
    return prepared if several else prepared[0], cast("Optimizer", stepping if multiple else stepping[0]), handing_out


def _each(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)

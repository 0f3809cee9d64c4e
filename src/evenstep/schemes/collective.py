"""Recipes without servers: workers sum gradients or average models among themselves, behind a barrier.

`bsp` also runs on servers, with the same mathematics.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import lcm
from typing import Annotated, Literal, TypeAlias

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import LoadOf
from evenstep.core.load.equal import Equal
from evenstep.core.load.experts import Experts
from evenstep.core.load.pairwise import PairwisePolicy
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.static import Static
from evenstep.core.load.time_models import TimeModelsPolicy
from evenstep.schemes.given_sizes import ByKey, Sizes
from evenstep.schemes.recipe import parse_scheme, recipe, sizes_of
from evenstep.schemes.scheme import Clip, NonfiniteSum, OptimizerName, Outer, Scheme, Served, ServerCount, Wire

MicroBatch: TypeAlias = Annotated[
    int | None,
    "Compute on this many samples at a time, and step once for all of them: a worker's size is then a number of"
    " micro-batches whose gradients add up. Needs the prepared optimizer and schedulers.",
]
Minimum: TypeAlias = Annotated[
    int | None, "The smallest batch of a worker; by default 2, or 1 if the global batch is too small for 2 each."
]
Maximum: TypeAlias = Annotated[int | None, "The largest batch of a worker."]
Multiple: TypeAlias = Annotated[int, "Sizes are multiples of this, except in the last slice of an epoch; 1 or more."]


@recipe
def bsp(
    *,
    micro_batch: MicroBatch = None,
    engine: Annotated[
        Literal["collective", "server"],
        "`collective`: workers sum gradients among themselves. `server`: over parameter servers, as `ssp` and `asp` do,"
        " with the same mathematics; slower, for comparisons, and for workers that may die.",
    ] = "collective",
    servers: ServerCount = 1,
    optimizer: OptimizerName = None,
    clip: Clip = None,
    load: Annotated[
        Scheme | str | None, 'With `engine="server"`: the scheme whose sizes are used, as in `asp`; equal by default.'
    ] = None,
) -> Scheme:
    """Bulk-synchronous training with equal batch sizes, like plain DistributedDataParallel.

    Source: Valiant, CACM 1990 (bulk-synchronous parallel). Parts: `Equal` sizes, a barrier.

    When to use it: all workers are equally fast. When not: any worker is slower, since all run at its speed.
    """
    if engine == "server":
        sizes = Equal() if load is None else sizes_of("bsp", load).load
        return Scheme(
            load=sizes, served=Served(servers=servers, clip=clip, optimizer=optimizer), micro_batch=micro_batch
        )
    if (servers, optimizer, clip, load) != (1, None, None, None):
        raise ConfigError(
            "bsp has no servers to give servers, optimizer, clip or load to: add engine=server, or leave them out"
        )
    return Scheme(load=Equal(multiple=_step_of_sizes(1, micro_batch)), micro_batch=micro_batch)


@recipe
def lb_bsp(
    *,
    predictor: Annotated[
        str,
        "`experts`: several exponential averages and equal sizes, weighed by what they would have gained so far. Or one"
        " alone: `ema`, `last`, or `narx`, the paper's. `experts+narx`: all of them.",
    ] = "experts",
    change_cost: Annotated[
        float | None, "What a change of sizes costs, in iterations, 0 or more; by default it is measured in the run."
    ] = None,
    tuner: Annotated[
        Literal["experts", "solver", "pairwise"],
        "`experts`: sizes in step with predicted speeds. LB-BSP's two for GPU clusters: `solver` fits a line to each"
        " worker's times and solves for the sizes with which all finish together, `pairwise` moves samples from the"
        " slowest worker to the fastest.",
    ] = "experts",
    exchange: Annotated[Literal["overlapped", "blocking"], "Speeds travel with gradients, or after."] = "overlapped",
    nonfinite: NonfiniteSum = "skip",
    micro_batch: MicroBatch = None,
    minimum: Minimum = None,
    maximum: Maximum = None,
    multiple: Multiple = 1,
) -> Scheme:
    """LB-BSP: at every iteration, each worker gets the batch size with which all finish together.

    Source: Chen, Weng, Wang, Li, Li: arXiv 1806.02508; SoCC 2020; TCC 2021. Parts: sizes by `ExpertsPolicy`,
    `TimeModelsPolicy` or `PairwisePolicy`, a barrier. The global batch stays constant and each gradient is weighted by
    x_i / X, so the mathematics is that of `bsp`. We differ in that there is no manager process (all workers decide
    alike from the same reports), in that several predictors compete, and in that sizes change only when the gains
    missed so far add up to the cost of a change.

    When to use it: some workers are slower than others, always or for a few iterations at a time. When not: slowness
    changes in every iteration; it cannot be predicted, and sizes stay about equal.
    """
    step = _step_of_sizes(multiple, micro_batch)
    if tuner != "experts" and (predictor, change_cost) != ("experts", None):
        raise ConfigError(f"tuner={tuner} uses no predictor: leave out predictor and change_cost, or the tuner")
    load: Experts | LoadOf
    if tuner == "experts":
        load = Experts(predictor=predictor, change_cost=change_cost, minimum=minimum, maximum=maximum, multiple=step)
        if micro_batch is not None:
            load = replace(load, warmup=0)  # The first of several micro-batches is the warm-up.
    else:
        make = PairwisePolicy if tuner == "pairwise" else TimeModelsPolicy
        load = LoadOf(make=make, minimum=minimum, maximum=maximum, multiple=step)
    return Scheme(load=load, exchange=exchange, micro_batch=micro_batch, nonfinite=nonfinite)


@recipe
def dbs(
    *,
    weighting: Annotated[
        Literal["samples", "mean"],
        "`mean` averages the gradients without weights, as the paper's code did at first; a sample on a slow worker"
        " then counts more than one on a fast worker, and results differ from those of one process.",
    ] = "samples",
    micro_batch: MicroBatch = None,
    minimum: Minimum = None,
    maximum: Maximum = None,
    multiple: Multiple = 1,
) -> Scheme:
    """DBS: in every epoch, each worker gets a share of the data and the batch in proportion to its last epoch's speed.

    Source: Ye, Zhou, Shi, Sun, Lv: arXiv 2007.11831; DLB, IEEE TETCI 2022. Parts: `PerEpoch` sizes, a barrier. A
    worker's performance is its share over its pure compute seconds. We differ in that sizes are rounded exactly (the
    published rounding loses samples), within limits; in that a worker's data are its parts of all slices of the epoch,
    not a fixed shard; and in that gradients are weighted by samples, as in DLB, unless `weighting` says otherwise.

    When to use it: speeds last for epochs, and sizes must not change within one. When not: slowness comes and goes
    within an epoch; it is missed, or corrected when it is over.
    """
    load = PerEpoch(minimum=minimum, maximum=maximum, multiple=_step_of_sizes(multiple, micro_batch))
    return Scheme(load=load, weighting=weighting, micro_batch=micro_batch)


@recipe
def local_sgd(
    *,
    period: Annotated[int, "Iterations between two averages; 1 or more."] = 8,
    load: Annotated[Scheme | str, "The scheme whose sizes are used, as in `asp`."] = "bsp",
    nonfinite: NonfiniteSum = "skip",
) -> Scheme:
    """Local SGD (model averaging): each worker trains alone for `period` iterations, then all average their models.

    The average is weighted by the samples that each worker computed on. The optimizer's state (momentum, Adam's
    moments) is averaged with the same weights, so that all workers are identical after an average, and one checkpoint
    serves them all. With plain or momentum SGD a period of 1 is then exactly `bsp`. Floating-point buffers (the
    statistics of BatchNorm) are averaged too. Averages come after every `period`-th iteration of an epoch and at its
    end; sizes change only there.

    Source: McDonald, Hall, Mann, NAACL 2010 (parameter mixing); Stich, ICLR 2019 (local SGD). Parts: the sizes of
    `load`, a barrier, a period. Neither paper says what to do with momentum; averaging it is our choice.

    When to use it: communication is slow compared with compute. When not: a worker stays slower; unless `load` gives it
    less to do, this saves exchanges but no waiting. A longer period also changes the mathematics.
    """
    sizes = sizes_of("local_sgd", load)
    return Scheme(load=sizes.load, period=period, nonfinite=nonfinite)


@recipe
def diloco(
    *,
    period: Annotated[int, "Iterations between two exchanges; 1 or more."] = 50,
    outer: Annotated[
        Literal["nesterov", "momentum", "sgd"],
        "The outer optimizer: SGD with Nesterov's momentum, with plain momentum, or without.",
    ] = "nesterov",
    outer_lr: Annotated[float, "The outer learning rate; above 0."] = 0.7,
    outer_momentum: Annotated[float, "The outer momentum, from 0 to below 1; unused with `outer=sgd`."] = 0.9,
    steps: Annotated[
        Literal["equal", "speed"],
        "`equal`: all workers take `period` steps. `speed`: batches keep the loader's size, and each worker takes as"
        " many steps as its speed allows, `period` on average.",
    ] = "equal",
    load: Annotated[
        Scheme | str, "The scheme whose sizes are used, as in `asp`; with `steps=speed`, `lb-bsp` by default."
    ] = "bsp",
    wire: Wire = "float32",
    fragments: Annotated[
        int,
        "Parts of the model, cut between parameters, that are averaged at different iterations of a period: each"
        " exchange has about this many times fewer bytes. 1 or more, and `period` at the most.",
    ] = 1,
    alpha: Annotated[
        float, "The part of its own weights that a worker keeps at an exchange, from 0 to below 1; 0 at an epoch's end."
    ] = 0.0,
    delay: Annotated[
        int, "Iterations for which workers compute on while their changes travel; below `period` / `fragments`."
    ] = 0,
    nonfinite: NonfiniteSum = "skip",
) -> Scheme:
    """DiLoCo: each worker trains alone for `period` iterations, then an outer optimizer steps along the mean change.

    The inner optimizers are the script's, and their state stays with each worker. The outer one steps along the mean of
    the workers' changes, weighted by the samples that each worker computed on, which is the paper's mean where sizes
    are equal. Floating-point buffers are averaged.

    Source: Douillard et al., arXiv 2311.08105, Algorithm 1. Parts: the sizes of `load`, a barrier, a period, an outer
    optimizer. The paper has equal workers; `load=lb-bsp` gives slower ones smaller batches, and `steps=speed` fewer
    steps (DyLU, Liu et al., arXiv 2401.09135, which counts them from the fastest worker; here their sum is constant).
    Fragments, `alpha` and `delay` are of Streaming DiLoCo (Douillard et al., arXiv 2501.18512).

    When to use it: communication is slow, and the models are large enough that momentum matters. When not: `local-sgd`
    averages Adam's moments too, which is closer to one process if the period is short.
    """
    sizes = sizes_of("diloco", "lb-bsp" if steps == "speed" and load == "bsp" else load)
    momentum = 0.0 if outer == "sgd" else outer_momentum
    rule = Outer(
        rate=outer_lr,
        momentum=momentum,
        nesterov=outer == "nesterov",
        wire=wire,
        fragments=fragments,
        alpha=alpha,
        delay=delay,
    )
    return Scheme(load=sizes.load, period=period, outer=rule, steps=steps, nonfinite=nonfinite)


@recipe
def static(
    sizes: Annotated[
        Sizes,
        "The batch size of each worker by rank, `12/9/3` in a scheme string; or by `rank:0`, `host:node7` and"
        " `gpu:NAME`, of which the first that matches a worker wins: `rank:0=12/host:node7=4`.",
    ] = (),
) -> Scheme:
    """Your own sizes: exact weights and no tuning; see also `batch_sizes` of `prepare`.

    Source: none. Parts: `Static` sizes, a barrier. The global batch is the sum of the sizes.

    When to use it: the right sizes are known. When not: speeds change or are not known.
    """
    return Scheme(load=ByKey(sizes=tuple(sizes.items())) if isinstance(sizes, Mapping) else Static(sizes=tuple(sizes)))


def in_batches(scheme: Scheme, size: int) -> Scheme:
    """The scheme whose sizes are whole batches of this size, micro-batches or steps of a period; others as they are.

    >>> in_batches(lb_bsp(predictor="last"), 2).name
    'lb-bsp:predictor=last,micro_batch=2'
    """
    if not (scheme.sums_every_gradient or scheme.counts_periods) or scheme.micro_batch is not None:
        return scheme
    name = scheme.name
    with suppress(ConfigError):  # Sizes that are given, and other recipes, have no such parameter.
        if scheme.load.multiple == 1 and parse_scheme(name, imports=False) == scheme:
            return parse_scheme(f"{name}{',' if ':' in name else ':'}micro_batch={size}", imports=False)
    load = replace(scheme.load, multiple=lcm(scheme.load.multiple, size))
    if scheme.counts_periods and isinstance(load, Experts):
        load = replace(load, warmup=0)  # The first of several batches is the warm-up.
    return replace(scheme, load=load, micro_batch=size)


def _step_of_sizes(multiple: int, micro_batch: int | None) -> int:
    """The step of sizes: whole micro-batches, if there are any; `Scheme` refuses those without a sample."""
    return micro_batch if micro_batch is not None and micro_batch > 0 and multiple == 1 else multiple

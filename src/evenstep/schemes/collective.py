"""Recipes without servers: the workers sum gradients, or average models, among themselves, behind a barrier.

`bsp` can be had on servers too, with the same mathematics.
"""

from collections.abc import Sequence
from typing import Literal

from evenstep.core.errors import ConfigError
from evenstep.core.load.equal import Equal
from evenstep.core.load.pairwise import Pairwise
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.predicted import Predicted
from evenstep.core.load.static import Static
from evenstep.schemes.recipe import recipe
from evenstep.schemes.scheme import Scheme, Served, one_of
from evenstep.schemes.spelling import sizes_of, spelled


@recipe
def bsp(
    *,
    micro_batch: int | None = None,
    engine: Literal["collective", "server"] = "collective",
    servers: int = 1,
    clip: float | None = None,
    load: Scheme | str | None = None,
) -> Scheme:
    """Bulk-synchronous training with equal batch sizes: what plain DistributedDataParallel does.

    Source: Valiant, CACM 1990 (bulk-synchronous parallel). Parts: `Equal` sizes, a barrier.

    When to use it: all workers are equally fast. When not: any of them is slower, since all run at its speed.

    Args:
        micro_batch: Compute on so many samples at a time and step once for all of them; see `lb_bsp`.
        engine: `collective`: workers sum gradients among themselves. `server`: over parameter servers, as `ssp` and
            `asp` do, with the same mathematics; slower, for comparisons, and for workers that may die.
        servers: With `engine="server"`: server processes, each with a part of the parameters.
        clip: With `engine="server"` and one server: the largest norm of the summed gradient over all parameters.
        load: With `engine="server"`: the scheme whose sizes are used, as in `asp`; by default `bsp`'s, equal ones.
    """
    one_of("engine", engine, ("collective", "server"))
    sizes = None if load is None else sizes_of("bsp", load)
    arguments = {"micro_batch": micro_batch, "engine": engine, "servers": servers, "clip": clip, "load": sizes}
    name = spelled("bsp", bsp, arguments)
    if engine == "server":
        return Scheme(
            name=name,
            load=Equal() if sizes is None else sizes.load,
            served=Served(servers=servers, clip=clip),
            micro_batch=micro_batch,
        )
    if (servers, clip, load) != (1, None, None):
        raise ConfigError("bsp has no servers to give servers, clip or load to: add engine=server, or leave them out")
    return Scheme(name=name, load=Equal(multiple=micro_batch or 1), micro_batch=micro_batch)


@recipe
def lb_bsp(
    *,
    predictor: str = "change",
    times: Literal["affine", "proportional"] | None = None,
    tuner: Literal["solver", "pairwise"] = "solver",
    exchange: Literal["overlapped", "blocking"] = "overlapped",
    micro_batch: int | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple: int = 1,
    compare: bool = True,
) -> Scheme:
    """LB-BSP: at every iteration each worker gets the batch size that lets all finish together.

    Source: Chen, Weng, Wang, Li, Li: arXiv 1806.02508; SoCC 2020; TCC 2021. Parts: `Predicted` or `Pairwise` sizes, a
    barrier. The global batch stays constant and each gradient is weighted by x_i / X, so the mathematics is that of
    `bsp`. We differ in that there is no manager process (each worker predicts itself and all run the same allocation),
    in the default predictor (`change`, which needs no training), and in that the time model is fitted from the
    iterations themselves.

    When to use it: some workers are slower than others, for good or for tens of iterations. When not: slowness that is
    new in every iteration cannot be predicted; then it keeps equal sizes.

    Args:
        predictor: How a worker predicts its speed: a name of `evenstep.core.load.PREDICTORS`, `narx` for the paper's.
        times: `proportional` (time through the origin, LB-BSP's model of CPU workers) or `affine` (a fixed part and a
            flat start too). By default `affine` with `change`, and `proportional` with the others: where sizes follow
            a speed from iteration to iteration, times stay alike, which a fit takes for a fixed part.
        tuner: `solver` (sizes from the predicted times at once) or `pairwise` (LB-BSP's tuner for GPU clusters, which
            predicts nothing and moves samples from the slowest worker to the fastest).
        exchange: `overlapped` or `blocking`; see `Scheme`.
        micro_batch: The fixed shape of what a worker computes on at once; a worker's size is then a number of
            micro-batches whose gradients add up to one step. Needs the prepared optimizer and schedulers.
        minimum: The smallest batch of a worker; by default 1, or 2 where the model has BatchNorm.
        maximum: The largest batch of a worker.
        multiple: Sizes are multiples of this, except in the last slice of an epoch.
        compare: Whether the first five iterations of a run, and later three in a row now and then, have equal sizes, so
            that the gain is measured; the later ones take at most 0.5 % of the time. Without it, no gain is reported.
    """
    arguments = {
        "predictor": predictor,
        "times": times,
        "tuner": tuner,
        "exchange": exchange,
        "micro_batch": micro_batch,
        "minimum": minimum,
        "maximum": maximum,
        "multiple": multiple,
        "compare": compare,
    }
    one_of("tuner", tuner, ("solver", "pairwise"))
    step = _step_of_sizes(multiple, micro_batch)
    load: Pairwise | Predicted
    if tuner == "pairwise":
        if (predictor, times) != ("change", None):
            raise ConfigError("the pairwise tuner predicts nothing: leave out predictor and times, or tuner=pairwise")
        load = Pairwise(minimum=minimum, maximum=maximum, multiple=step)
    else:
        if times is None:
            times = "affine" if predictor == "change" else "proportional"
        load = Predicted(predictor=predictor, times=times, minimum=minimum, maximum=maximum, multiple=step)
    name = spelled("lb-bsp", lb_bsp, arguments)
    return Scheme(name=name, load=load, exchange=exchange, micro_batch=micro_batch, compare=compare)


@recipe
def dbs(
    *,
    weighting: Literal["samples", "mean"] = "samples",
    micro_batch: int | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple: int = 1,
) -> Scheme:
    """DBS: at every epoch each worker gets a share of the data, and of the batch, in step with its last epoch's speed.

    Source: Ye, Zhou, Shi, Sun, Lv: arXiv 2007.11831; DLB, IEEE TETCI 2022. Parts: `PerEpoch` sizes, a barrier. A
    worker's performance is its share over its pure compute seconds. We differ in that sizes are rounded exactly (the
    published rounding loses samples), within limits; in that a worker's data are its parts of all slices of the epoch,
    not a fixed shard; and in that gradients are weighted by samples, as in DLB, unless `weighting` says otherwise.

    When to use it: speeds that stay for epochs, and sizes that must not move within one. When not: slowness that comes
    and goes within an epoch is missed, or corrected when it is over.

    Args:
        weighting: `mean` averages the gradients without weights, as the code of the time of the paper did; a sample on
            a slow worker then counts more than one on a fast one, and results differ from those of one process.
        micro_batch: As in `lb_bsp`.
        minimum: The smallest batch of a worker; by default 1, or 2 where the model has BatchNorm.
        maximum: The largest batch of a worker.
        multiple: Sizes are multiples of this, except in the last slice of an epoch.
    """
    arguments = {
        "weighting": weighting,
        "micro_batch": micro_batch,
        "minimum": minimum,
        "maximum": maximum,
        "multiple": multiple,
    }
    load = PerEpoch(minimum=minimum, maximum=maximum, multiple=_step_of_sizes(multiple, micro_batch))
    name = spelled("dbs", dbs, arguments)
    return Scheme(name=name, load=load, weighting=weighting, micro_batch=micro_batch)


@recipe
def local_sgd(*, period: int = 8, load: Scheme | str = "bsp") -> Scheme:
    """Local SGD (model averaging): each worker trains alone for `period` iterations, then all average their models.

    The average is weighted by the samples that each worker computed on. The optimizer's state (momentum, Adam's
    moments) is averaged with the same weights, so that after an average all workers are alike, and any one's checkpoint
    serves them all; with plain or momentum SGD a period of 1 is then exactly `bsp`. Buffers that are floating-point
    numbers (the statistics of BatchNorm) are averaged too. Averages fall on every `period`-th iteration of an epoch and
    on its end; sizes change only there.

    Source: McDonald, Hall, Mann, NAACL 2010 (parameter mixing); Stich, ICLR 2019 (local SGD). Parts: the sizes of
    `load`, a barrier, a period. Neither paper says what becomes of momentum; averaging it is our choice.

    When to use it: communication is slow against compute. When not: against a worker that stays slower it saves
    exchanges and no waiting, unless `load` gives it less to do; and a longer period changes the mathematics.

    Args:
        period: Iterations between two averages; 1 or more.
        load: The scheme whose sizes are used: `bsp` (equal), `lb-bsp`, `dbs`, or one that a recipe made.
    """
    sizes = sizes_of("local_sgd", load)
    name = spelled("local-sgd", local_sgd, {"period": period, "load": sizes})
    return Scheme(name=name, load=sizes.load, period=period, compare=sizes.compare)


def static(sizes: Sequence[int]) -> Scheme:
    """The user's own sizes, one per worker, with the right weights and no tuning; see `batch_sizes` of `prepare`.

    Parts: `Static` sizes, a barrier. When to use it: the sizes are known. When not: speeds change. No string makes it.
    """
    return Scheme(name="static:" + "/".join(str(size) for size in sizes), load=Static(sizes=tuple(sizes)))


def _step_of_sizes(multiple: int, micro_batch: int | None) -> int:
    """What sizes are multiples of: whole micro-batches, where there are any.

    Raises:
        ConfigError: A micro-batch has less than one sample.
    """
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(f"a micro-batch of {micro_batch} samples is not possible: use 1 or more")
    return micro_batch if micro_batch is not None and multiple == 1 else multiple

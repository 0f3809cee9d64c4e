"""The schemes by the names that people know, and the one parser of scheme strings.

A recipe is a few lines that put parts together. This is the only place where a name stands for an algorithm.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.equal import Equal
from evenstep.core.load.pairwise import Pairwise
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.predicted import Predicted
from evenstep.core.load.static import Static
from evenstep.core.nearest import nearest
from evenstep.core.samples import WEIGHTINGS
from evenstep.core.sync import Barrier, Bounded, Dynamic, Sync, Unbounded
from evenstep.core.sync.rate import RATES


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is to be said of a run on parameter servers beside its scheme's answers.

    Attributes:
        servers: Server processes, each with a part of the parameters.
        rate: How the learning rate and the momentum of a commit follow from its share of the global batch: a name of
            `evenstep.core.sync.rate.RATES`.
        clip: The largest norm of a commit's gradient over all parameters; a larger one is scaled down. None: any.
        nonfinite: What becomes of a push that holds a NaN or an infinity: `skip` leaves it out and counts it, `refuse`
            ends its worker with an error.
        exchange: `blocking` waits for the new weights in `optimizer.step()`; `overlapped` computes the next iteration
            on the weights at hand meanwhile, so on weights that lack one more of its own pushes.

    Raises:
        ConfigError: A value is out of range.
    """

    servers: int = 1
    rate: str = "share"
    clip: float | None = None
    nonfinite: Literal["skip", "refuse"] = "skip"
    exchange: Literal["blocking", "overlapped"] = "blocking"

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"{self.servers} servers cannot hold the parameters: use 1 or more")
        _one_of("rate", self.rate, RATES)
        _one_of("nonfinite", self.nonfinite, ("skip", "refuse"))
        _one_of("exchange", self.exchange, ("blocking", "overlapped"))
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"a gradient's norm cannot be clipped to {self.clip}: use a positive number")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One answer to each question: *how much* (`load`) and *how far ahead* (`sync`), everyone with everyone.

    Attributes:
        name: The scheme string that makes the same scheme.
        load: How much each worker computes before the next synchronisation.
        sync: How far ahead a worker may run before it waits for the others.
        served: The run's parameter servers; None where workers sum gradients among themselves, behind a barrier.
        period: None: gradients are summed in every iteration. A number: each worker trains alone for so many
            iterations, then the parameters are averaged.
        weighting: `samples`: a worker counts by its samples, x_i / X, which is the mathematics of one process; `mean`:
            all workers count alike, whatever their sizes.
        exchange: When the workers tell each other their speeds: `overlapped` with the communication of the gradients,
            or `blocking`, after it, when every worker's waiting is over.
        micro_batch: The fixed shape of what a worker computes on at once, in samples; its size is a number of these.
            None: its whole batch at once.

    Raises:
        ConfigError: The parts do not go together.
    """

    name: str
    load: Load
    sync: Sync = Barrier()
    served: Served | None = None
    period: int | None = None
    weighting: Literal["samples", "mean"] = "samples"
    exchange: Literal["overlapped", "blocking"] = "overlapped"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        _one_of("weighting", self.weighting, WEIGHTINGS)
        _one_of("exchange", self.exchange, ("overlapped", "blocking"))
        if self.period is not None:
            self._require_local()
        if self.served is not None:
            self._require_servable(self.served)
        elif self.sync != Barrier():
            raise ConfigError("workers that run ahead of each other need parameter servers: give served=Served()")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(f"a micro-batch of {self.micro_batch} samples is not possible: use 1 or more")
        if self.micro_batch is not None and self.load.multiple % self.micro_batch:
            raise ConfigError(
                f"sizes in multiples of {self.load.multiple} cannot be cut into micro-batches of {self.micro_batch}:"
                " leave out one of them"
            )

    def _require_local(self) -> None:
        """What does not go together with workers that train alone between two averages."""
        if self.period is not None and self.period < 1:
            raise ConfigError(f"a period of {self.period} iterations is not possible: use 1 or more")
        if self.micro_batch is not None:
            raise ConfigError(
                "local_sgd takes a step on every batch, so there is nothing to accumulate: leave out micro_batch, or"
                " use lb_bsp or dbs with it"
            )
        if self.exchange != "overlapped":
            raise ConfigError("local_sgd exchanges speeds with its averages: leave out exchange")

    def _require_servable(self, served: Served) -> None:
        """What does not go together on parameter servers."""
        if self.period is not None or self.micro_batch is not None or self.exchange != "overlapped":
            raise ConfigError(
                f"the servers of {self.name!r} take a push from every batch and its speed with it: leave out period,"
                " micro_batch and the exchange of speeds"
            )
        if self.weighting != "samples":
            raise ConfigError(f"the servers of {self.name!r} weigh by samples: leave out weighting")
        if self.sync.in_step and served.exchange == "overlapped":
            raise ConfigError(
                "a barrier leaves nothing to compute on while it is waited for: leave out exchange=overlapped, or use"
                " ssp, dssp or asp"
            )
        if self.sync.in_step and served.clip is not None and served.servers > 1:
            raise ConfigError(
                "no server sees the whole of a sum of several workers' gradients: clip with one server, or without a"
                " barrier"
            )

    def __str__(self) -> str:
        return self.name


def bsp(
    *,
    micro_batch: int | None = None,
    engine: Literal["collective", "server"] = "collective",
    servers: int = 1,
    clip: float | None = None,
    load: Scheme | str | None = None,
) -> Scheme:
    """Bulk-synchronous training with equal batch sizes: what plain DistributedDataParallel does.

    When to use it: all workers are equally fast. When not: any of them is slower, since all run at its speed.

    Args:
        micro_batch: Compute on so many samples at a time and step once for all of them; see `lb_bsp`.
        engine: `collective`: workers sum gradients among themselves. `server`: over parameter servers, as `ssp` and
            `asp` do, with the same mathematics; slower, for comparisons, and for workers that may die.
        servers, clip, load: With `engine="server"`: as in `asp`.
    """
    arguments = {
        "micro_batch": micro_batch,
        "engine": engine,
        "servers": servers,
        "clip": clip,
        "load": None if load is None else _nested(load),
    }
    _one_of("engine", engine, ("collective", "server"))
    name = _spelled("bsp", bsp, arguments)
    if engine == "server":
        return Scheme(
            name=name,
            load=_sizes_of("bsp", load or "bsp"),
            served=Served(servers=servers, clip=clip),
            micro_batch=micro_batch,
        )
    if (servers, clip, load) != (1, None, None):
        raise ConfigError("bsp has no servers to give servers, clip or load to: add engine=server, or leave them out")
    return Scheme(name=name, load=Equal(multiple=micro_batch or 1), micro_batch=micro_batch)


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
) -> Scheme:
    """LB-BSP: at every iteration each worker gets the batch size that lets all finish together.

    Source: Chen, Weng, Wang, Li, Li: arXiv 1806.02508; SoCC 2020; TCC 2021. The global batch stays constant and each
    gradient is weighted by x_i / X, so the mathematics is that of `bsp`. We differ in that there is no manager process
    (each worker predicts itself and all run the same allocation), in the default predictor (`change`, which needs no
    training), and in that the time model is fitted from the iterations themselves.

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
    }
    _one_of("tuner", tuner, ("solver", "pairwise"))
    step = _step_of_sizes(multiple, micro_batch)
    load: Load
    if tuner == "pairwise":
        if (predictor, times) != ("change", None):
            raise ConfigError("the pairwise tuner predicts nothing: leave out predictor and times, or tuner=pairwise")
        load = Pairwise(minimum=minimum, maximum=maximum, multiple=step)
    else:
        if times is None:
            times = "affine" if predictor == "change" else "proportional"
        load = Predicted(predictor=predictor, times=times, minimum=minimum, maximum=maximum, multiple=step)
    name = _spelled("lb-bsp", lb_bsp, arguments)
    return Scheme(name=name, load=load, exchange=exchange, micro_batch=micro_batch)


def dbs(
    *,
    weighting: Literal["samples", "mean"] = "samples",
    micro_batch: int | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple: int = 1,
) -> Scheme:
    """DBS: at every epoch each worker gets a share of the data, and of the batch, in step with its last epoch's speed.

    Source: Ye, Zhou, Shi, Sun, Lv: arXiv 2007.11831; DLB, IEEE TETCI 2022. A worker's performance is its share over its
    pure compute seconds. We differ in that sizes are rounded exactly (the published rounding loses samples), within
    limits; in that a worker's data are its parts of all slices of the epoch, not a fixed shard; and in that gradients
    are weighted by samples, as in DLB, unless `weighting` says otherwise.

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
    name = _spelled("dbs", dbs, arguments)
    return Scheme(name=name, load=load, weighting=weighting, micro_batch=micro_batch)


def local_sgd(*, period: int = 8, load: Scheme | str = "bsp") -> Scheme:
    """Local SGD (model averaging): each worker trains alone for `period` iterations, then all average their models.

    The average is weighted by the samples that each worker computed on. The optimizer's state (momentum, Adam's
    moments) is averaged with the same weights, so that after an average all workers are alike, and any one's checkpoint
    serves them all; with plain or momentum SGD a period of 1 is then exactly `bsp`. Buffers that are floating-point
    numbers (the statistics of BatchNorm) are averaged too. Averages fall on every `period`-th iteration of an epoch and
    on its end; sizes change only there.

    Source: McDonald, Hall, Mann, NAACL 2010 (parameter mixing); Stich, ICLR 2019 (local SGD). Neither says what becomes
    of momentum; averaging it is our choice.

    When to use it: communication is slow against compute. When not: against a worker that stays slower it saves
    exchanges and no waiting, unless `load` gives it less to do; and a longer period changes the mathematics.

    Args:
        period: Iterations between two averages; 1 or more.
        load: The scheme whose sizes are used: `bsp` (equal), `lb-bsp`, `dbs`, or one that a recipe made.
    """
    name = _spelled("local-sgd", local_sgd, {"period": period, "load": _nested(load)})
    return Scheme(name=name, load=_sizes_of("local_sgd", load), period=period)


def asp(
    *,
    load: Scheme | str = "bsp",
    rate: str = "share",
    clip: float | None = None,
    nonfinite: Literal["skip", "refuse"] = "skip",
    exchange: Literal["blocking", "overlapped"] = "blocking",
    servers: int = 1,
) -> Scheme:
    """ASP: nobody waits for anybody; each push changes the parameters at once.

    Source: Dean et al., NIPS 2012 (Downpour SGD); Li et al., OSDI 2014 (parameter servers). Neither says how the
    learning rate of BSP carries over; ours follows each push's share of the global batch and its staleness
    (`evenstep.core.sync.rate`).

    When to use it: speeds differ and change too quickly for sizes to follow, and the last bit of accuracy may go. When
    not: lasting differences, which `lb_bsp` takes away without any staleness.

    Args:
        load: The scheme whose sizes are used: `bsp` (equal), `lb-bsp`, `dbs`, or one that a recipe made. In a scheme
            string its own parameters stand behind a colon, with semicolons: `asp:load=lb-bsp:predictor=ema;minimum=4`.
        rate: How the learning rate and momentum of a push follow from its share of the global batch; `raw` leaves them
            as they are, as papers do, and diverges with many workers.
        clip: The largest norm of a push's gradient, over all parameters; `clip_grad_norm_` in the script would see
            only this worker's.
        nonfinite: `skip` leaves a push with a NaN or an infinity out and counts it; `refuse` ends its worker.
        exchange: `overlapped` computes the next iteration while a push is under way.
        servers: Server processes, each with a part of the parameters.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    name = _spelled("asp", asp, {"load": _nested(load), **_said(served)})
    return Scheme(name=name, load=_sizes_of("asp", load), sync=Unbounded(), served=served)


def ssp(
    *,
    bound: int = 3,
    load: Scheme | str = "bsp",
    rate: str = "share",
    clip: float | None = None,
    nonfinite: Literal["skip", "refuse"] = "skip",
    exchange: Literal["blocking", "overlapped"] = "blocking",
    servers: int = 1,
) -> Scheme:
    """SSP: a worker may begin its next iteration as long as its lead over the slowest is at most `bound`.

    Source: Ho et al., NIPS 2013. We differ in that a push changes the parameters at once for all, and in its rate (see
    `asp`).

    When to use it: slowness that comes and goes within a few iterations. When not: a worker that stays slower, to whose
    speed all come down as soon as the bound is used up; add `load=lb-bsp` then.

    Args:
        bound: The largest lead at which a worker is released, in iterations; 0 or more.
        load, rate, clip, nonfinite, exchange, servers: As in `asp`.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    name = _spelled("ssp", ssp, {"bound": bound, "load": _nested(load), **_said(served)})
    return Scheme(name=name, load=_sizes_of("ssp", load), sync=Bounded(bound=bound), served=served)


def dssp(
    *,
    lower: int = 3,
    upper: int = 15,
    bounded: bool = True,
    load: Scheme | str = "bsp",
    rate: str = "share",
    clip: float | None = None,
    nonfinite: Literal["skip", "refuse"] = "skip",
    exchange: Literal["blocking", "overlapped"] = "blocking",
    servers: int = 1,
) -> Scheme:
    """DSSP: as SSP, with a bound that moves between `lower` and `upper` to where the fastest is expected to wait least.

    Source: Zhao et al., ICDCS 2019. The algorithm as printed has defects, which are corrected
    (`evenstep.core.sync.dynamic` lists them), and does not keep to `upper`; here it does, unless `bounded` is false.

    When to use it: as SSP, where no single bound is right. When not: a worker that stays slower; any scheme that keeps
    to a bound then runs at its speed.

    Args:
        lower: The lead up to which a worker is always released, in iterations; 0 or more.
        upper: The lead up to which it may be released; at least `lower`.
        bounded: False: grants add up without a limit, which is what the paper's Table I must have run.
        load, rate, clip, nonfinite, exchange, servers: As in `asp`.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    arguments = {"lower": lower, "upper": upper, "bounded": bounded, "load": _nested(load), **_said(served)}
    sync = Dynamic(lower=lower, upper=upper, bounded=bounded)
    return Scheme(name=_spelled("dssp", dssp, arguments), load=_sizes_of("dssp", load), sync=sync, served=served)


def static(sizes: Sequence[int]) -> Scheme:
    """The user's own sizes, one per worker, with the right weights and no tuning; see `batch_sizes` of `prepare`."""
    return Scheme(name="static:" + "/".join(str(size) for size in sizes), load=Static(sizes=tuple(sizes)))


RECIPES: Mapping[str, Callable[..., Scheme]] = MappingProxyType(
    {"bsp": bsp, "lb-bsp": lb_bsp, "dbs": dbs, "local-sgd": local_sgd, "asp": asp, "ssp": ssp, "dssp": dssp}
)
"""The recipes that a scheme string can name."""

DEFAULT = "lb-bsp"


def parse_scheme(text: str) -> Scheme:
    """The scheme that a string such as `lb-bsp:predictor=ema,multiple=8` stands for.

    Raises:
        ConfigError: The name or a parameter is unknown (the message names the nearest), or a value cannot be read.

    >>> parse_scheme("lb-bsp:multiple=8").name
    'lb-bsp:multiple=8'
    >>> parse_scheme("lbbsp")
    Traceback (most recent call last):
    evenstep.core.errors.ConfigError: there is no scheme 'lbbsp': did you mean 'lb-bsp'?
    """
    name, _, rest = text.strip().partition(":")
    name = name.strip().lower().replace("_", "-")
    if name not in RECIPES:
        raise ConfigError(f"there is no scheme {name!r}: {nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe).parameters
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in parameters:
            raise ConfigError(f"the scheme {name!r} has no parameter {key!r}: {nearest(key, parameters)}")
        if not equals or not value:
            raise ConfigError(f"the parameter {key!r} of {text!r} has no value: write {key}=...")
        if key in arguments:
            raise ConfigError(f"the parameter {key!r} stands twice in {text!r}: give it once")
        arguments[key] = _read(value, parameters[key], name)
    return recipe(**arguments)


def _read(value: str, parameter: inspect.Parameter, scheme: str) -> bool | float | str:
    kind = parameter.annotation
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{parameter.name} of the scheme {scheme!r} is true or false, not {value!r}")
        return value.lower() == "true"
    if kind not in _NUMBERS:
        # Commas end a parameter, so those of a scheme within a scheme are written as semicolons.
        return value.replace(";", ",")
    try:
        return _NUMBERS[kind](value)
    except ValueError:
        what = "a whole number" if _NUMBERS[kind] is int else "a number"
        raise ConfigError(f"{parameter.name} of the scheme {scheme!r} takes {what}, not {value!r}") from None


_NUMBERS: Mapping[object, Callable[[str], float]] = MappingProxyType(
    {int: int, int | None: int, float: float, float | None: float}
)


def _nested(load: Scheme | str) -> str:
    """A scheme's name as it stands in another's: parameters between semicolons."""
    return (load if isinstance(load, str) else load.name).replace(",", ";")


def _sizes_of(recipe: str, load: Scheme | str) -> Load:
    """The sizes of a scheme that is given for them alone.

    Raises:
        ConfigError: It says more than how much each worker computes.
    """
    sizes = parse_scheme(load) if isinstance(load, str) else load
    if sizes != Scheme(name=sizes.name, load=sizes.load):
        raise ConfigError(
            f"{recipe} takes only the sizes of {sizes.name!r}: leave out what it says beside them (weighting,"
            " exchange, micro_batch, period, servers)"
        )
    return sizes.load


def _said(served: Served) -> dict[str, Any]:
    return {name: getattr(served, name) for name in ("rate", "clip", "nonfinite", "exchange", "servers")}


def _spelled(name: str, recipe: Callable[..., Scheme], arguments: Mapping[str, Any]) -> str:
    """The scheme string with the arguments that differ from the recipe's defaults."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(recipe).parameters.items()}
    given = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in arguments.items()
        if value != defaults[key]
    ]
    return f"{name}:{','.join(given)}" if given else name


def _step_of_sizes(multiple: int, micro_batch: int | None) -> int:
    """What sizes are multiples of: whole micro-batches, where there are any.

    Raises:
        ConfigError: A micro-batch has less than one sample.
    """
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(f"a micro-batch of {micro_batch} samples is not possible: use 1 or more")
    return micro_batch if micro_batch is not None and multiple == 1 else multiple


def _one_of(parameter: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{parameter} cannot be {value!r}: use {' or '.join(known)}")

"""Recipes on parameter servers, whose workers need not wait for each other at every iteration."""

from collections.abc import Callable, Mapping
from typing import Literal

from evenstep.core.sync import Bounded, Dynamic, Sync, Unbounded
from evenstep.schemes.recipe import recipe
from evenstep.schemes.scheme import Scheme, Served
from evenstep.schemes.spelling import sizes_of, spelled


@recipe
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

    Source: Dean et al., NIPS 2012 (Downpour SGD); Li et al., OSDI 2014 (parameter servers). Parts: the sizes of
    `load`, no bound. Neither paper says how the learning rate of BSP carries over; ours follows each push's share of
    the global batch and its staleness (`evenstep.core.sync.rate`).

    When to use it: speeds differ and change too quickly for sizes to follow, and the last bit of accuracy may go. When
    not: lasting differences, which `lb_bsp` takes away without any staleness.

    Args:
        load: The scheme whose sizes are used: `bsp` (equal), `lb-bsp`, `dbs`, or one that a recipe made. In a scheme
            string its own parameters stand behind a colon, with semicolons: `asp:load=lb-bsp:predictor=ema;minimum=4`.
        rate: How the learning rate of a push follows from its share of the global batch and its staleness: ours
            (`share`), or `linear`, `staleness` or `power`, to compare with; `raw` leaves it as it is, as papers do, and
            diverges with many workers.
        clip: The largest norm of a push's gradient, over all parameters; `clip_grad_norm_` in the script would see
            only this worker's part of the batch.
        nonfinite: `skip` leaves a push with a NaN or an infinity out and counts it; `refuse` ends its worker.
        exchange: `overlapped` computes the next iteration while a push is under way.
        servers: Server processes, each with a part of the parameters.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    return _on_servers("asp", asp, Unbounded(), served, load, {})


@recipe
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

    Source: Ho et al., NIPS 2013. Parts: the sizes of `load`, a fixed bound. We differ in that a push changes the
    parameters at once for all, and in its rate (see `asp`).

    When to use it: slowness that comes and goes within a few iterations. When not: a worker that stays slower, to whose
    speed all come down as soon as the bound is used up; add `load=lb-bsp` then.

    Args:
        bound: The largest lead at which a worker is released, in iterations; 0 or more.
        load: The scheme whose sizes are used, as in `asp`.
        rate: As in `asp`.
        clip: The largest norm of a push's gradient, as in `asp`.
        nonfinite: `skip` or `refuse`, as in `asp`.
        exchange: `blocking` or `overlapped`, as in `asp`.
        servers: Server processes, each with a part of the parameters.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    return _on_servers("ssp", ssp, Bounded(bound=bound), served, load, {"bound": bound})


@recipe
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

    Source: Zhao et al., ICDCS 2019. Parts: the sizes of `load`, a dynamic bound. The algorithm as printed has defects,
    which are corrected (`evenstep.core.sync.dynamic` lists them), and does not keep to `upper`; here it does, unless
    `bounded` is false.

    When to use it: as SSP, where no single bound is right. When not: a worker that stays slower; any scheme that keeps
    to a bound then runs at its speed.

    Args:
        lower: The lead up to which a worker is always released, in iterations; 0 or more.
        upper: The lead up to which it may be released; at least `lower`.
        bounded: False: grants add up without a limit, as we infer that they did in the paper's Table I.
        load: The scheme whose sizes are used, as in `asp`.
        rate: As in `asp`.
        clip: The largest norm of a push's gradient, as in `asp`.
        nonfinite: `skip` or `refuse`, as in `asp`.
        exchange: `blocking` or `overlapped`, as in `asp`.
        servers: Server processes, each with a part of the parameters.
    """
    served = Served(servers=servers, rate=rate, clip=clip, nonfinite=nonfinite, exchange=exchange)
    sync = Dynamic(lower=lower, upper=upper, bounded=bounded)
    return _on_servers("dssp", dssp, sync, served, load, {"lower": lower, "upper": upper, "bounded": bounded})


def _on_servers(
    name: str,
    recipe: Callable[..., Scheme],
    sync: Sync,
    served: Served,
    load: Scheme | str,
    own: Mapping[str, object],
) -> Scheme:
    """The scheme of a recipe with these parameters; `own` are those that the others do not have."""
    sizes = sizes_of(name, load)
    said = {each: getattr(served, each) for each in ("rate", "clip", "nonfinite", "exchange", "servers")}
    name = spelled(name, recipe, {**own, "load": sizes, **said})
    return Scheme(name=name, load=sizes.load, sync=sync, served=served)

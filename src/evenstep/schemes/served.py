"""Recipes on parameter servers, where workers need not wait for each other in every iteration."""

from typing import Annotated, Any, Literal, TypeAlias, TypedDict, Unpack

from evenstep.core.sync import Bounded, Dynamic, Sync, Unbounded
from evenstep.schemes.recipe import recipe, sizes_of
from evenstep.schemes.scheme import LOCAL_STEPS, Outer, PushTo, Scheme, Served, ServerOptions

Sizes: TypeAlias = Annotated[
    Scheme | str,
    "The scheme whose sizes are used: `bsp` (equal), `lb-bsp`, `dbs`, or one that a recipe made. In a scheme string,"
    " its own parameters follow a colon and are separated by semicolons: `asp:load=lb-bsp:predictor=ema;minimum=4`.",
]


class PeriodOptions(TypedDict, total=False):
    """The options of local steps between two pushes."""

    period: Annotated[
        int | None,
        "Local steps of a worker between two pushes, 1 or more: each push is then the change of its model. None: every"
        " gradient is pushed.",
    ]
    steps: Annotated[
        Literal["equal", "speed"],
        "With a period, `equal`: each period has `period` steps; `speed`: as many as the worker's speed allows,"
        " `period` on average.",
    ]
    outer: Annotated[
        Literal["sgd", "delayed", "nesterov"],
        "With a period, the servers' optimizer of changes: `sgd` has no momentum; `delayed` (Delayed Nesterov) applies"
        " it once for each global batch of changes; `nesterov` with each, as in `asp`.",
    ]
    outer_lr: Annotated[float, "Its learning rate; above 0."]
    outer_momentum: Annotated[float, "Its momentum, from 0 to below 1; unused with `outer=sgd`."]


class LocalStepOptions(ServerOptions, PeriodOptions, total=False):
    """The options of `Served`, and those of local steps between two pushes."""


@recipe
def asp(*, load: Sizes = "bsp", **options: Unpack[LocalStepOptions]) -> Scheme:
    """ASP: no worker waits for another, and each push changes the parameters at once.

    Source: Dean et al., NIPS 2012 (Downpour SGD); Li et al., OSDI 2014 (parameter servers). Parts: the sizes of
    `load`, no bound. Neither paper says how the learning rate of BSP carries over; ours follows each push's share of
    the global batch and its staleness (`evenstep.core.sync.rate`).

    When to use it: speeds differ and change too quickly for sizes to follow, and a little accuracy may be lost. When
    not: differences last; `lb_bsp` removes them without any staleness.
    """
    return on_servers("asp", Unbounded(), load, **options)


@recipe
def ssp(
    *,
    bound: Annotated[int, "The largest lead at which a worker is released, in iterations; 0 or more."] = 3,
    load: Sizes = "bsp",
    **options: Unpack[LocalStepOptions],
) -> Scheme:
    """SSP: a worker may begin its next iteration if its lead over the slowest is at most `bound`.

    Source: Ho et al., NIPS 2013. Parts: the sizes of `load`, a fixed bound. We differ in that a push changes the
    parameters at once for all, and in its rate (see `asp`).

    When to use it: slowness comes and goes within a few iterations. When not: a worker stays slower, because all
    workers slow down to its speed once the bound is reached; add `load=lb-bsp` then.
    """
    return on_servers("ssp", Bounded(bound=bound), load, **options)


@recipe
def dssp(
    *,
    lower: Annotated[int, "The lead up to which a worker is always released, in iterations; 0 or more."] = 3,
    upper: Annotated[int, "The lead up to which it may be released; at least `lower`."] = 15,
    bounded: Annotated[
        bool, "False: grants add up without a limit, as we infer that they did in the paper's Table I."
    ] = True,
    load: Sizes = "bsp",
    **options: Unpack[LocalStepOptions],
) -> Scheme:
    """DSSP: SSP with a bound that moves between `lower` and `upper` to where the fastest is expected to wait least.

    Source: Zhao et al., ICDCS 2019. Parts: the sizes of `load`, a dynamic bound. The printed algorithm has defects,
    which are corrected (`evenstep.core.sync.dynamic` lists them), and exceeds `upper`; here it does not, unless
    `bounded` is false.

    When to use it: as SSP, if no single bound is right. When not: a worker stays slower; any scheme with a bound then
    runs at its speed.
    """
    return on_servers("dssp", Dynamic(lower=lower, upper=upper, bounded=bounded), load, **options)


def on_servers(
    recipe: str, sync: Sync, load: Scheme | str, *, push_to: PushTo = "root", **options: Unpack[LocalStepOptions]
) -> Scheme:
    """The scheme of this sync on servers, where workers push every gradient, or the change of a period."""
    local: dict[str, Any] = {name: options.pop(name, usual) for name, usual in LOCAL_STEPS.items()}  # type: ignore[misc]
    period, steps, kind, rate, momentum = local.values()
    outer = None
    if local != {**LOCAL_STEPS, "steps": steps}:
        outer = Outer(rate=rate, momentum=0.0 if kind == "sgd" else momentum, delayed=kind == "delayed")
    sizes = sizes_of(recipe, "lb-bsp" if steps == "speed" and load == "bsp" else load)
    served = Served(push_to=push_to, **options)  # type: ignore[misc]
    return Scheme(load=sizes.load, sync=sync, served=served, period=period, outer=outer, steps=steps)

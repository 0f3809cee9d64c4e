"""An optimizer's treatment of asynchronous commits: how rate, gradient and the weights sent out follow staleness.

Knows torch's optimizers only by the names of their options.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

RATES: Final = ("share", "raw")
"""The rules: ours (the default), and the unchanged options, to reproduce papers."""

_DAMPED_PART: Final = 0.3
"""The part of momentum's gain that one global batch of staleness removes, except under SGD."""
_COMPENSATION: Final = 3.0
"""Compensation per unit of a weight."""
_OF_SGD: Final = frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"})
"""The options of torch's SGD, the only one of its optimizers that has a dampening."""


class RatedStep(NamedTuple):
    """The step of a param group for a commit.

    With g the gradient, w the weights at the commit and v those that g was computed on, element by element:

        G = gradient_factor * (g + compensation * |g| * (w - v))

    The weights move by -`direct` * G, and then the optimizer takes a step with these options on G.
    """

    options: dict[str, object]
    gradient_factor: float = 1.0
    compensation: float = 0.0
    direct: float = 0.0


def commit_step(
    options: Mapping[str, object], *, share: float, behind: float, commits: int = 0, rule: str = "share"
) -> RatedStep:
    """The options, as torch names them, that an optimizer uses for one commit in place of a param group's.

    Source: ours, described in docs/schemes/asp.md. SGD with momentum mu takes a commit of share s, sigma global batches
    behind, like Nesterov's method with a momentum that counts samples, not commits. With learning rate a and buffer b:

        f = s / (1 + mu sigma),   b <- mu^s b + f g,   w <- w - a f g - a mu (1 - mu^s) / (1 - mu) b

    At s = 1, sigma = 0 it is Nesterov's step. The gradient is compensated as in Zheng et al., ICML 2017 (DC-ASGD),
    with lambda |g| for the diagonal of the Hessian. Other rules that were tried: benchmarks/momentum_rules.py.

    With other optimizers the learning rate is multiplied by

        f = s / (1 + 0.3 sigma (gain - 1)),   gain = 1 / (1 - mu)

    A commit that is small compared to the n that it missed is only the part r = min(1, s n / sigma) of an Adam step,
    whose betas become beta^r (benchmarks/group_rates.py). Delayed Nesterov, the one with a `share`, takes s g as it is.

    Args:
        options: `lr`, and those of `momentum`, `dampening`, `betas`, `weight_decay` ... that the optimizer has.
        share: The part of the global batch that the commit stands for, above 0. At 1 and `behind` 0 the options stay.
        behind: Global batches committed between its pull and its push, 0 or more.
        commits: The number of these commits, which is its staleness.
        rule: One of `RATES`; `raw` keeps the options.
    """
    if "share" in options:
        return RatedStep({**options, "share": share}, gradient_factor=1.0 if rule == "raw" else share)
    if rule == "raw" or (share, behind) == (1.0, 0.0):
        return RatedStep(dict(options))
    if "dampening" in options and options.keys() <= _OF_SGD and _number(options, "momentum"):
        return _momentum_step(options, share, behind)
    new = dict(options)
    new["lr"] = _number(options, "lr") * share / (1.0 + behind * _DAMPED_PART * (_gain(options) - 1.0))
    part = min(1.0, share * commits / behind) if commits and behind else 1.0
    if "betas" in options and part < 1.0:
        new["betas"] = tuple(beta**part for beta in cast("tuple[float, ...]", options["betas"]))
    return RatedStep(new)


def _momentum_step(options: Mapping[str, object], share: float, behind: float) -> RatedStep:
    """The step of SGD with momentum."""
    rate, momentum = _number(options, "lr"), _number(options, "momentum")
    factor = share / (1.0 + momentum * behind)
    new = dict(options)
    new["momentum"] = momentum**share
    new["lr"] = rate * momentum * _steps(momentum, share)
    if "nesterov" in options:
        new["nesterov"] = False
    if "weight_decay" in options:
        # It only passes through the buffer, which carries a gradient mu times as far as both ways together.
        new["weight_decay"] = _number(options, "weight_decay") * factor / momentum
    uphill = -1.0 if options.get("maximize") else 1.0
    return RatedStep(
        new,
        factor,
        uphill * _COMPENSATION if behind else 0.0,
        uphill * rate * (1.0 - _number(options, "dampening")),
    )


def look_ahead(options: Mapping[str, object], commits: float, *, rule: str = "share") -> float:
    """The distance along the momentum by which a worker is given other weights: weights - this * direction.

    The direction is SGD's and RMSprop's momentum buffer, or the step at rate 1 that Adam's two moments give. In this
    many commits, momentum alone takes the weights there, so a worker computes its gradient about where it is committed.

    Source: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a Distributed Asynchronous Environment", 2019 (DANA),
    for SGD, which looks one commit of each worker ahead; we look ahead by the staleness of the worker's last push, with
    one momentum for all. For Adam ours, by the same reasoning, with its second moment assumed constant.

    Args:
        options: As they are for the commits expected between this pull and the following push.
        commits: The number of expected commits; 0 or more.
        rule: As in `commit_step`; `raw` does not look ahead.

    Returns:
        The factor; 0 without momentum.
    """
    if rule == "raw":
        return 0.0
    momentum = cast("tuple[float, ...]", options["betas"])[0] if "betas" in options else _number(options, "momentum")
    # Nesterov's steps are one power of the momentum shorter, besides their own gradient's.
    first = momentum * (momentum if options.get("nesterov") else 1.0)
    return _number(options, "lr") * first * _steps(momentum, commits)


def clip_factor(norm: float, most: float) -> float:
    """The factor that limits a gradient of this norm to a norm of at most `most`, which is positive."""
    return min(1.0, most / norm) if norm > 0 else 1.0


def _steps(momentum: float, count: float) -> float:
    """The sum of the first `count` powers of the momentum, where `count` need not be whole."""
    return (1.0 - momentum**count) / (1.0 - momentum) if momentum < 1.0 else count


def _gain(options: Mapping[str, object]) -> float:
    """The displacement that a constant gradient brings per step, over the learning rate."""
    # A momentum of 1 forgets nothing; torch allows it, and its gain has no bound.
    return 1.0 / max(1.0 - _number(options, "momentum"), 1e-12)


def _number(options: Mapping[str, object], name: str) -> float:
    """An option, which may be a tensor, as a number; 0 if the optimizer has no option of that name."""
    return cast("float", options.get(name, 0.0))

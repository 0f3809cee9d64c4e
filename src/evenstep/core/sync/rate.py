"""What an optimizer does with an asynchronous commit: how rate, gradient and the weights sent out follow staleness.

Knows torch's optimizers by the names of their options alone.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from evenstep.core.errors import ConfigError

RATES: Final = ("share", "raw")
"""The rules: ours, which is the default; and the options as they are, to reproduce papers."""

_DAMPED_PART: Final = 0.3
"""The part of momentum's gain that one global batch of staleness takes back."""
_COMPENSATION: Final = 3.0
"""Per unit of a weight."""


class Step(NamedTuple):
    """How a param group takes a commit: with these options, and this instead of its gradient g.

    gradient_factor * (g + compensation * |g| * (w - v)), element by element, w the weights that the commit meets and v
    those that g was computed on.
    """

    options: dict[str, object]
    gradient_factor: float = 1.0
    compensation: float = 0.0


def commit_step(
    options: Mapping[str, object], *, share: float, behind: float, commits: int = 0, rule: str = "share"
) -> Step:
    """What an optimizer is to use for one commit, in place of one param group's options, as torch names them.

    Source: ours, described in docs/schemes/asp.md. With share s, sigma global batches behind and momentum mu
    (dampening d) a commit counts

        f = s / (1 + 0.3 sigma (gain - 1)),   gain = max(1, (1 - d) / (1 - mu))

    SGD with momentum takes f into the gradient (and weight decay) that enters its memory; with other optimizers f
    scales the learning rate. A commit that is small beside the n that it missed is only the part r = min(1, s n /
    sigma) of a step: mu becomes mu^r, SGD's learning rate is multiplied by (1 - mu^r) / (1 - mu), and Adam's betas
    become beta^r (benchmarks/group_rates.py). The gradient is compensated as in Zheng et al., ICML 2017 (DC-ASGD),
    with lambda |g| for the diagonal of the Hessian (benchmarks/rate_study.py).

    Args:
        options: `lr`, and of `momentum`, `dampening`, `betas`, `weight_decay` ... what the optimizer has.
        share: The part of the global batch that the commit stands for, above 0. At 1 and 0 behind the options stay.
        behind: Global batches that were committed between its pull and its push, 0 or more.
        commits: How many commits those were, which is its staleness.
        rule: One of `RATES`; `raw` keeps the options.

    Raises:
        ConfigError: There is no such rule.
    """
    if rule not in RATES:
        raise ConfigError(f"there is no rate {rule!r}: use one of {', '.join(RATES)}")
    new = dict(options)
    if rule == "raw" or (share, behind) == (1.0, 0.0):
        return Step(new)
    factor = share / (1.0 + behind * _DAMPED_PART * (_gain(options) - 1.0))
    part = min(1.0, share * commits / behind) if commits and behind else 1.0
    if _keeps_gradients(options):
        new["weight_decay"] = _number(options, "weight_decay") * factor
        if part < 1.0:
            momentum = _number(options, "momentum")
            new["momentum"] = momentum**part
            new["lr"] = _number(options, "lr") * ((1 - momentum**part) / (1 - momentum) if momentum < 1.0 else part)
        uphill = -1.0 if options.get("maximize") else 1.0
        return Step(new, factor, uphill * _COMPENSATION if behind else 0.0)
    new["lr"] = _number(options, "lr") * factor
    if "betas" in options and part < 1.0:
        new["betas"] = _powers(options, part)
    return Step(new)


def look_ahead(options: Mapping[str, object], commits: int, *, rule: str = "share") -> float:
    """How far on to move the weights that a worker is given, along the momentum: weights - this * direction.

    The direction is SGD's and RMSprop's momentum buffer, or the step at rate 1 that Adam's two moments give. Momentum
    alone takes the weights there in this many commits, so a worker computes its gradient about where it is committed.

    Source: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a Distributed Asynchronous Environment", 2019 (DANA),
    for SGD, which looks one commit of each worker ahead; we look over the commits that the worker's last push was stale
    by, and keep one momentum for all. For Adam ours, by the same reasoning, with its second moment taken to stay.

    Args:
        options: As of the latest commit.
        commits: How many are expected between this pull and the push that follows; 0 or more.
        rule: As in `commit_step`; under `raw` nothing looks ahead.

    Returns:
        0 where there is no momentum.
    """
    if rule == "raw":
        return 0.0
    momentum = cast("tuple[float, ...]", options["betas"])[0] if "betas" in options else _number(options, "momentum")
    powers = momentum * (1.0 - momentum**commits) / (1.0 - momentum) if momentum < 1.0 else float(commits)
    # Nesterov's steps are one power of the momentum shorter, beside their own gradient's.
    return _number(options, "lr") * powers * (momentum if options.get("nesterov") else 1.0)


def clip_factor(norm: float, most: float) -> float:
    """What to multiply a gradient of this norm by, so that its norm is at most `most`, which is positive."""
    return min(1.0, most / norm) if norm > 0 else 1.0


def _powers(options: Mapping[str, object], power: float) -> tuple[float, ...]:
    return tuple(beta**power for beta in cast("tuple[float, ...]", options["betas"]))


def _keeps_gradients(options: Mapping[str, object]) -> bool:
    """Whether a memory of gradients as they come drives the steps: torch's SGD alone has a dampening of it."""
    return "dampening" in options and _number(options, "momentum") != 0.0


def _gain(options: Mapping[str, object]) -> float:
    """The displacement that a constant gradient brings per step, over the learning rate; at least 1."""
    # A momentum of 1 forgets nothing; torch allows it, and its gain has no bound.
    return max(1.0, (1.0 - _number(options, "dampening")) / max(1.0 - _number(options, "momentum"), 1e-12))


def _number(options: Mapping[str, object], name: str) -> float:
    """An option as a number, which may be a tensor; 0 where the optimizer has none of that name."""
    return cast("float", options.get(name, 0.0))

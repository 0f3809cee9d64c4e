"""The options of a commit: how learning rate and momentum follow from its share of the global batch and its staleness.

Knows torch's optimizers by the names of their options alone.
"""

from collections.abc import Mapping
from typing import Final, cast

from evenstep.core.errors import ConfigError

RATES: Final = ("share", "raw")
"""The rules: ours, which is the default, and none, as the papers have it."""


def commit_options(
    options: Mapping[str, object], *, share: float, staleness: float, rule: str = "share"
) -> dict[str, object]:
    """What an optimizer is to use for one commit, in place of the options of one param group, as torch names them.

    Source: ours. The papers of ASP, SSP and DSSP leave the rate as it was and do not say how BSP's carries over; with
    N workers that is N times the displacement per global batch. With share s, staleness sigma and momentum mu
    (dampening d):

        lr' = lr * s / (1 + sigma * (gain - 1)),   gain = max(1, (1 - d) / (1 - mu))

    and everything else as it was. `gain` is how far momentum carries a gradient beyond its own step; 1 where there is
    none, and for Adam and its like, whose momentum is a mean.

    Why: s keeps the displacement per global batch at BSP's. Staleness is a delay in a feedback loop, and what that
    loop bears is a displacement per global batch of about 1 / (sigma * curvature), however short or long the momentum
    remembers; plain SGD under BSP bears 2 / curvature, so only momentum's gain must go, and in the measure of sigma:
    without staleness it stays whole, at one global batch the displacement is that of plain SGD at the same rate.
    Powers of mu were measured as well and left out: mu^s multiplies the displacement by nearly 1 / s and diverges;
    damped to BSP's displacement it diverges later (benchmarks/rate_study.py). What stability costs is speed: on a
    budget of a few hundred commits, momentum at the largest rate that BSP bears learns less here than under BSP.

    Not exact: momentum remembers as many commits, so fewer samples than under BSP; so do Adam's moments and their bias
    corrections, which count commits. Smaller parts have noisier gradients, which makes the steps of Adam and RMSprop
    shorter. Adagrad's sum grows by every part, so its steps shrink by about the root of s. A commit of another share or
    staleness scales its step, with all that momentum brings along, not its own gradient alone.

    Args:
        options: `lr`, and of `momentum`, `dampening`, `betas`, `weight_decay` ... what the optimizer has.
        share: The part of the global batch that the commit stands for, above 0. At 1, and
            without staleness, the options stay exactly as given.
        staleness: Global batches that were committed between its pull and its push, 0 or more.
        rule: One of `RATES`; `raw` keeps the options.

    Raises:
        ConfigError: There is no such rule.
    """
    if rule not in RATES:
        raise ConfigError(f"there is no rate {rule!r}: use one of {', '.join(RATES)}")
    new = dict(options)
    if rule == "share" and (share, staleness) != (1.0, 0.0):
        # A rate may be a tensor, and is any number.
        new["lr"] = cast("float", options["lr"]) * (share / (1.0 + staleness * (_gain(options) - 1.0)))
    return new


def _gain(options: Mapping[str, object]) -> float:
    """The displacement that a constant gradient brings per step, over the learning rate; at least 1."""
    momentum = cast("float", options.get("momentum", 0.0))
    dampening = cast("float", options.get("dampening", 0.0))
    # A momentum of 1 forgets nothing; torch allows it, and its gain has no bound.
    return max(1.0, (1.0 - dampening) / max(1.0 - momentum, 1e-12))

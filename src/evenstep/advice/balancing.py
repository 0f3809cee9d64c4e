"""The second half of the verdict on a run with equal sizes: what sizes by speed would gain."""

from collections.abc import Callable
from typing import Final

from evenstep.advice.advise import WORTH, advise
from evenstep.advice.machines import Machines
from evenstep.core.errors import ConfigError
from evenstep.report.account.verdict import PLAIN, Verdict

BALANCED: Final = "lb-bsp"


def balancing(verdict: Verdict, machines: Callable[[], Machines], then: str) -> str:
    """What `lb-bsp` would gain over a run under `bsp`, as `evenstep plan` predicts it; and `then`, where it does gain.

    Empty where the verdict says that sizes cannot help.
    """
    if not verdict.sizes_may_help:
        return ""
    try:
        advice = advise(machines(), schemes=(BALANCED,))
    except ConfigError:  # One worker, or too few iterations.
        return ""
    if advice.pick.scheme == PLAIN:
        return f"{BALANCED} would gain less than {WORTH:.0%}."
    return f"{advice.text} Next: {then}."

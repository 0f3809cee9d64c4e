"""What to say after a name that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str]) -> str:
    """The second half of a sentence about an unknown name: the valid one that it resembles, or all of them.

    >>> nearest("perod", ["period", "factor"])
    "did you mean 'period'?"
    >>> nearest("speed", ["period", "factor"])
    "choose one of 'period', 'factor'"
    """
    names = list(valid)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if not names:
        return "none is defined"
    return "choose one of " + ", ".join(map(repr, names))

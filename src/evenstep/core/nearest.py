"""Suggestions for a name that does not exist."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

_CLOSE: Final = 0.6
"""The fraction of their letters that two names must share, in order, to be taken for each other."""
_SAME_BEGINNING: Final = 0.1
"""Bonus for the same first letter, which is seldom mistyped."""
_MOST: Final = 12
"""The most names in a list of choices."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The second half of a message about an unknown name: the valid name that it resembles, or all valid names.

    >>> nearest("perod", ["period", "factor"])
    "did you mean 'period'?"
    >>> nearest("lbsp", ["bsp", "lb-bsp"])
    "did you mean 'lb-bsp'?"
    >>> nearest("speed", ["period", "factor", "factor"])
    "choose one of 'period', 'factor'"
    """
    names = list(dict.fromkeys(valid))
    if not names:
        return "none is defined"
    closest = max(names, key=lambda each: _likeness(name, each))
    if _likeness(name, closest) >= _CLOSE:
        return f"did you mean {closest!r}?"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return "choose one of " + ", ".join(map(repr, names[:_MOST])) + more


def _likeness(name: str, valid: str) -> float:
    """From 0 to 1, with the bonus for the first letter; 0 where they are too far apart for any bonus."""
    matcher = SequenceMatcher(None, valid, name)
    if matcher.real_quick_ratio() < _CLOSE:  # Compares lengths only, since a name may be megabytes long.
        return 0.0
    ratio = matcher.ratio()
    return ratio + _SAME_BEGINNING * (name[:1] == valid[:1]) if ratio >= _CLOSE else 0.0

"""Values as messages show them: short, and without characters that a terminal would take for a command."""

from typing import Final

_LONGEST: Final = 60
"""The most letters of a value that a message shows."""
_FEW: Final = 3
"""The most items of a list that is shown in full."""


def shown(value: object) -> str:
    """The `repr` of a text, a number, a truth value or None, shortened if long; of other values only the type.

    >>> shown("lbsp"), shown(2.5), shown([1, "asp"]), shown({1: 2}), shown(print), shown(10**100)
    ("'lbsp'", '2.5', "[1, 'asp']", '{...}', 'builtin_function_or_method', 'a number of more than 70 digits')
    """
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, list) and len(value) <= _FEW:
        return f"[{', '.join(type(each).__name__ if isinstance(each, list) else shown(each) for each in value)}]"
    if not isinstance(value, str | int | float | None):
        return type(value).__name__
    if isinstance(value, int) and value.bit_length() > 4 * _LONGEST:
        return "a number of more than 70 digits"
    text = repr(value[: 2 * _LONGEST] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if there is none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def printable(text: str) -> str:
    r"""The text with its control characters, except new lines, replaced by their codes.

    >>> printable("a\x1b[2J\nb")
    'a\\x1b[2J\nb'
    """
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)

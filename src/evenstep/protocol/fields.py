"""Reads what a peer sent: each field is checked for its type and range before anything is done with it."""

from typing import final

from evenstep.core.errors import ProtocolError
from evenstep.transport.base import Header


@final
class Fields:
    """The fields of one message; every getter raises ProtocolError where the field is missing or out of range."""

    def __init__(self, header: Header) -> None:
        self._header = header

    def whole(self, name: str, least: int = 0, most: int = 2**62) -> int:
        """A whole number within these limits."""
        value = self._header.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ProtocolError(f"a message had {value!r} as {name}, not a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._header.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise ProtocolError(f"a message had {value!r} as {name}, not a finite number")
        return float(value)

    def text(self, name: str) -> str:
        """A string."""
        value = self._header.get(name)
        if not isinstance(value, str):
            raise ProtocolError(f"a message had {type(value).__name__} as {name}, not a string")
        return value

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers; none where it is missing."""
        value = self._header.get(name, [])
        if not isinstance(value, list) or any(type(each) not in (int, float) for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of numbers")
        if any(not abs(each) < float("inf") for each in value):
            raise ProtocolError(f"a message had a number as {name} that is not finite")
        return [float(each) for each in value]

    def wholes(self, name: str, count: int) -> list[int]:
        """A list of so many whole numbers."""
        value = self._header.get(name)
        if not isinstance(value, list) or len(value) != count or any(type(each) is not int for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of {count} whole numbers")
        return value

    def listed_wholes(self, name: str) -> list[int]:
        """A list of whole numbers, of at least 0 and as many as there are."""
        value = self._header.get(name)
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of whole numbers")
        return value

    def has(self, name: str) -> bool:
        """Whether it is there, and not None."""
        return self._header.get(name) is not None

    def lists(self, name: str) -> list[list[int]]:
        """A list of lists."""
        value = self._header.get(name)
        if not isinstance(value, list) or any(not isinstance(each, list) for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of lists")
        return value

    def pairs(self, name: str) -> list[tuple[list[int], float]]:
        """A list of lists of whole numbers, each with a number."""
        value = self._header.get(name)
        if not isinstance(value, list) or any(not isinstance(each, list) or len(each) != 2 for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of pairs")
        return [(list(first), float(second)) for first, second in value]

    def items(self, name: str) -> list[dict[str, object]]:
        """A list of maps."""
        value = self._header.get(name)
        if not isinstance(value, list) or any(not isinstance(each, dict) for each in value):
            raise ProtocolError(f"a message had {str(value)[:60]} as {name}, not a list of maps")
        return value

    def table(self, name: str) -> dict[str, object]:
        """A map."""
        value = self._header.get(name)
        if not isinstance(value, dict):
            raise ProtocolError(f"a message had {type(value).__name__} as {name}, not a map")
        return value

"""Reads event files that anybody may have written: bounded in memory, never waiting, and believing no value.

Everything that reads a run directory reads it through here.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, get_args, get_origin

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.telemetry.events import RECORDS
from evenstep.telemetry.regular import open_regular

_LONGEST: Final = 16 << 20
"""Bytes of a line; one of a run of 100,000 workers takes a tenth of that."""
_MOST: Final = 2**63
"""Numbers in an event are smaller than this, and above its negative."""
_WORKERS: Final = 1_000_000
"""More than any run has."""

_Fits: TypeAlias = Callable[[Any], bool]


def whole_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The lines of a file from an offset on; a last one without its end, which a kill has torn, is left out.

    A line of more than 16 MB comes in pieces of that length, of which `event_of` makes nothing.

    Raises:
        ConfigError: The file is no regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            while line := file.readline(_LONGEST):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    return
                yield line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): delete it, or let it be read") from error


def event_of(line: bytes) -> dict[str, Any]:
    """The event of a whole line, whose fields have the types of their record.

    All numbers in it are finite; seconds, counts and workers are not negative.

    Raises:
        ValueError: It is none.
    """
    if len(line) >= _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST >> 20} MB")
    try:
        event = _DECODER.decode(line.decode())
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ValueError('an event is a JSON object with a text "event"')
        if event["event"] == "iteration":
            _check_iteration(event)
        else:
            _check(event, event)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except TypeError as error:
        raise ValueError("something else stands where a number belongs") from error
    return event


# Nearly all events of a run are iterations, and there are millions of them: what can be done in C, is.

_ALIKE: Final = frozenset(
    (
        *("iteration_seconds", "input_seconds", "compute_seconds", "wait_seconds", "comm_seconds"),
        *("iteration", "samples", "worker"),
    )
)
_OF_ITERATION: Final = itemgetter(*_ALIKE)


def _check_iteration(event: dict[str, Any]) -> None:
    try:
        numbers = _OF_ITERATION(event)
    except KeyError:
        _check(event, event)
        return
    if not (min(numbers) >= 0 and max(numbers) < _MOST and event["worker"] < _WORKERS):
        raise ValueError("a number is negative, or too large")
    _check(event, [name for name in event if name not in _ALIKE])


def _check(event: dict[str, Any], names: Iterable[str]) -> None:
    """Check the fields of these names, those of a kind that is not known here for the sizes of their numbers alone.

    Raises:
        ValueError: One is not what it must be.
    """
    known = _FITS.get(event["event"], _NOTHING)
    for name in names:
        if not known.get(name, _is_small)(event[name]):
            raise ValueError(f"{name!r} cannot be {shown(event[name])}")


def _is_small(value: object) -> bool:
    """Whether all numbers in it are; not of NaN, which the decoder refuses."""
    if isinstance(value, int | float):
        return -_MOST < value < _MOST
    if isinstance(value, list):
        return all(map(_is_small, value))
    return all(map(_is_small, value.values())) if isinstance(value, dict) else True


def _fits_of(record: type[Any]) -> dict[str, _Fits]:
    """Of each field of a record, whether a value fits it."""
    return {each.name: _named(each.name, each.type) for each in fields(record)} | {"worker": _named("worker", int)}


def _named(name: str, annotation: Any) -> _Fits:  # noqa: ANN401 - whatever stands in a record
    if name in ("at", "unix_seconds"):
        return _fits(float)  # In a record None stands for what is missing; in a file it would be a damage.
    fits = _fits(annotation)
    if name == "worker":
        return lambda value: fits(value) and 0 <= value < _WORKERS
    if name == "iteration":
        return lambda value: fits(value) and value >= -1  # Before the first one.
    if name in ("samples", "epoch") or name.endswith("seconds"):
        return lambda value: fits(value) and value >= 0
    return fits


def _fits(annotation: Any) -> _Fits:  # noqa: ANN401 - whatever stands in a record
    """Whether a value that JSON can hold is of an annotation of a record."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Sequence and arguments[0] in (int, float):
        # Anything but numbers cannot be compared with one.
        return lambda value: type(value) is list and (not value or (min(value) > -_MOST and max(value) < _MOST))
    if kind is Sequence:
        item = _fits(arguments[0])
        return lambda value: type(value) is list and all(map(item, value))
    if kind is Mapping:
        item = _fits(arguments[1])
        return lambda value: type(value) is dict and all(map(item, value.values()))
    if arguments:  # Something, or None.
        something = _fits(arguments[0])
        return lambda value: value is None or something(value)
    if annotation is float:
        return lambda value: (type(value) is float or type(value) is int) and -_MOST < value < _MOST
    if annotation is int:
        return lambda value: type(value) is int and -_MOST < value < _MOST
    return lambda value: type(value) is annotation


_NOTHING: Final[Mapping[str, _Fits]] = {}
_FITS: Final = {kind: _fits_of(record) for kind, record in RECORDS.items()}


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)

"""The errors that evenstep raises. Each message is one sentence that says what to change."""

from collections.abc import Iterator
from contextlib import contextmanager


class EvenstepError(Exception):
    """Base of every error that evenstep raises on purpose."""


class ConfigError(EvenstepError, ValueError):
    """The caller asked for something that cannot work; the message names the value and says what to change."""


class DisagreementError(EvenstepError, RuntimeError):
    """Workers that must take the same decision took different ones; the message names them."""


class WorkerLostError(EvenstepError, RuntimeError):
    """A worker died, stopped or fell silent beyond the timeout; the message names it."""


class CheckpointError(EvenstepError, RuntimeError):
    """A checkpoint could not be written or read; the message says why. Earlier complete checkpoints are intact."""


class ProtocolError(EvenstepError, RuntimeError):
    """An event or a message is not possible in the present state; the error message names both."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix the message of a ConfigError that is raised inside with `place`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None

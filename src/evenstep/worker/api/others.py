"""Refuses the steps of what was not prepared, in a loop over prepared batches: its gradients are one worker's alone."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evenstep.core.errors import ConfigError


@contextmanager
def refused(kind: type, step: str, refusal: Callable[[object], str | None]) -> Iterator[None]:
    """Wrap a class's method `step`, in this context; `refusal` says why an object may not call it, None if it may."""
    usual, inside = getattr(kind, step), True

    @functools.wraps(usual)
    def wrapped(stepped: object, *arguments: object, **options: object) -> object:
        if inside and (why := refusal(stepped)) is not None:
            raise ConfigError(why)
        return usual(stepped, *arguments, **options)

    setattr(kind, step, wrapped)
    try:
        yield
    finally:
        inside = False
        if getattr(kind, step) is wrapped:  # Otherwise another loop has wrapped it meanwhile.
            setattr(kind, step, usual)

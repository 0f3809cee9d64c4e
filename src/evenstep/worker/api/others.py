"""Refuses the steps of what was not prepared, in a loop over prepared batches: its gradients are one worker's alone."""

import functools
from collections.abc import Callable
from typing import final

from evenstep.core.errors import ConfigError


@final
class Others:
    """Wraps the step of a framework's class as long as a script is in such a loop.

    Args:
        kind: The class.
        step: The name of its method.
        refusal: Says why an object of the class may not step now; None if it was prepared.
    """

    def __init__(self, kind: type, step: str, refusal: Callable[[object], str | None]) -> None:
        self._kind, self._step, self._refusal = kind, step, refusal
        self._loops: set[object] = set()

    def begin(self, loop: object) -> None:
        """Refuse them from now on, until all loops have ended."""
        if not self._loops:
            self._usual = step = getattr(self._kind, self._step)

            @functools.wraps(step)
            def wrapped(stepped: object, *arguments: object, **options: object) -> object:
                if (why := self._refusal(stepped)) is not None:
                    raise ConfigError(why)
                return step(stepped, *arguments, **options)

            setattr(self._kind, self._step, wrapped)
        self._loops.add(loop)

    def end(self, loop: object) -> None:
        """Note that this loop has ended, if it had begun."""
        if self._loops == {loop}:
            setattr(self._kind, self._step, self._usual)
        self._loops.discard(loop)

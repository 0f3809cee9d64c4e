"""The loop over a `Balancer`'s shares that the loaders of all frameworks have in common."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray
from evenstep.worker.api.ahead import Ahead
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share
from evenstep.worker.replicas import Replicas


@final
class ShareBatches:
    """Hands out the batch of each share, and reports the time from there to the complete gradient.

    Args:
        balancer: Divides the samples.
        ahead: Fetches the batches.
        before: What a batch was asked for before, if its predecessor was not reported, and what to do.
        loop: The context of a loop over the batches.
        indices_of: Returns the indices of a share's batch; its second argument says whether the batch is only planned.
        replicas: The weights that all workers have alike where they sum gradients; None if the caller compares them.

    Attributes:
        current: The share of the last batch, as reported if it was; None before the first.
        due: Whether that batch has not been reported yet.
    """

    def __init__(
        self,
        balancer: Balancer,
        ahead: Ahead[Any],
        before: str,
        loop: Callable[[], AbstractContextManager[None]] = nullcontext,
        indices_of: Callable[[Share, bool], IntArray] = lambda share, planned: share.indices,
        replicas: Replicas | None = None,
    ) -> None:
        self.current: Share | None = None
        self.due = False
        self._balancer, self._ahead = balancer, ahead
        self._before, self._indices_of, self._loop = before, indices_of, loop
        self._replicas = replicas if balancer.scheme.period is None else None
        self._reports = 0
        self._handed = 0.0

    def of(self, shares: Iterable[Share]) -> Generator[Any]:
        """Yield the batches of these shares, an epoch of the balancer, which goes on as long as the caller keeps it."""
        self.due = False
        with self._loop():
            for share in shares:
                batch, planned = self._ahead.batch(self._indices_of(share, False)), self._balancer.planned
                self._ahead.plan(None if planned is None else self._indices_of(planned, True))
                self.current, self.due, self._handed = share, True, time.perf_counter()
                yield batch
                if self.due:
                    raise ConfigError(f"a batch was asked for before {self._before}")

    def report(self, *, finite: bool, apart: float = 0.0) -> Share:
        """Report that the gradient of the batch is complete; returns its share with the weights to use.

        `apart`: seconds since the batch that are not its compute. The errors are those of `Balancer.report`, and a
        DisagreementError if the workers' weights have parted.
        """
        self._balancer.report(max(time.perf_counter() - self._handed - apart, 0.0), finite=finite)
        self.due, self.current = False, self._balancer.share
        assert self.current is not None
        if self._replicas is not None:
            self._replicas.look(self._reports)
            self._reports += 1
        return self.current


@contextmanager
def refused(kind: type, step: str, refusal: Callable[[object], str | None]) -> Iterator[None]:
    """Wrap a class's method `step`, in this context; `refusal` says why an object may not call it, None if it may.

    What was not prepared steps on gradients of this worker alone.
    """
    usual, inside = getattr(kind, step), True

    @wraps(usual)
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

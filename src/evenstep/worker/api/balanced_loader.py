"""The common part of the loaders of all frameworks on a `Balancer`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from evenstep.core.values import IntArray
from evenstep.schemes import Scheme
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.row_exchange import RowExchange
from evenstep.worker.api.setup import ShareOptions
from evenstep.worker.common_data import require_common


class LoaderOptions(ShareOptions, total=False):
    """The options of the session or the `prepare` of every framework on a `Balancer`.

    `timeout`: seconds that a worker may take from one exchange of all workers to the next, compiling and evaluation
    included, before the others raise an error that names it; None for the one of `evenstep run`, else 300.
    `partition`: "common" skips the comparison of a few samples with which workers notice that they have different data.
    The others are as for `evenstep.Balancer`.
    """

    timeout: float | None
    partition: Literal["common"] | None


def balance(
    rows: RowExchange,
    scheme: Scheme | str | None,
    *,
    length: int,
    global_batch_size: int,
    layout: Sequence[str],
    batch_of: Callable[[IntArray], Sequence[Any]],
    timeout: float | None = None,
    partition: Literal["common"] | None = None,
    **options: Unpack[ShareOptions],
) -> Balancer:
    """Return the balancer of workers that exchange these rows, once all agree and have the same arrays and data.

    `layout` describes each array that workers exchange or must have alike; `batch_of` returns the arrays of the batch
    with these indices, int64 of shape [rows]. The other arguments are as for `Balancer`, and as in `LoaderOptions`.

    Raises:
        ConfigError: Something cannot work on this worker or on another, which is named.
        DisagreementError: The workers have different settings, arrays or data.
    """
    rows.limit(timeout)
    balancer = Balancer(
        scheme,
        rank=rows.rank,
        workers=rows.workers,
        all_gather=rows.all_gather,
        length=length,
        global_batch_size=global_batch_size,
        averages=True,
        **options,
    )
    rows.gather.require_same(layout)
    require_common(batch_of, length, rows.gather.records, rank=rows.rank, partition=partition)
    return balancer


class BalancedLoader(ABC):
    """Hands out this worker's batches; each loop over it is an epoch."""

    @abstractmethod
    def _settled(self) -> Balancer:
        """The balancer that divides the samples; an epoch whose last step is done has ended."""

    @property
    def next_epoch(self) -> int:
        """The epoch with which to begin or continue, as in `for epoch in range(loader.next_epoch, epochs)`."""
        return self._settled().next_epoch

    @property
    def sizes(self) -> list[int]:
        """The samples of each worker in an iteration, as last planned."""
        return self._settled().sizes

    def note(self, **values: float) -> None:
        """Record values in the event log, if there is one: `loader.note(loss=loss)`; `evenstep report` plots them."""
        self._settled().note(**values)

    def weigh_by(self, count: float) -> None:
        """Weigh this batch by its part of all workers' units (tokens, pixels), for a loss that is a mean over them.

        Call it for every batch, on every worker, before gradients are summed. `count`: the divisor of the loss.
        """
        self._settled().weigh_by(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position and the basis of sizes: plain numbers, lists and dicts, to save with the weights.

        The state of any one worker serves all of them. Under `local-sgd`, call it after an average.
        """
        return self._settled().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called, also with another number of workers. Errors as for Balancer."""
        self._settled().load_state_dict(state)

    def close(self) -> None:
        """End the record of this worker. Only needed in processes that train several times."""
        self._settled().close()

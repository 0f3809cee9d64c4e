"""What the loader of every framework passes on to its `Balancer`."""

from abc import ABC, abstractmethod
from typing import Any

from evenstep.worker.api.balancer import Balancer


class BalancedLoader(ABC):
    """Hands out this worker's batches; each loop over it is an epoch."""

    @abstractmethod
    def _settled(self) -> Balancer:
        """What shares out the samples; an epoch whose last step is done has ended."""

    @property
    def next_epoch(self) -> int:
        """The epoch with which to begin or to continue, as in `for epoch in range(loader.next_epoch, epochs)`."""
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

        Call it for every batch, on every worker, before gradients are summed. `count`: what the loss is divided by.
        """
        self._settled().weigh_by(count)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, and what the sizes rest on: plain numbers, lists and dicts, to be saved with the weights.

        The state of any one worker serves all of them. Under `local-sgd` it is to be had after an average.
        """
        return self._settled().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called, also with another number of workers. Errors as for Balancer."""
        self._settled().load_state_dict(state)

    def close(self) -> None:
        """End the record of this worker. Only needed in processes that train several times."""
        self._settled().close()

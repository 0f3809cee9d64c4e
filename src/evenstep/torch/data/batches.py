"""What a script does with a loop over batches beside iterating: weights, metrics, notes, the end."""

from dataclasses import dataclass
from typing import Any, Self, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.data.loop import Loop
from evenstep.torch.data.metrics import Value, gather_over_workers, mean_over_workers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """Counts of one worker, over all epochs of this process.

    Attributes:
        iterations: Iterations handed out.
        misses: Samples that data workers had to fetch out of turn because batch sizes changed.
        overruns: Iterations whose real compute took longer than the time to be emulated.
        skipped: Gradients, pushes or models of this worker that were left out because they held a NaN or an infinity.
        waiting: The part of all workers' time in which they waited for the slowest, 0 to 1, of all loaders. Worker 0
            alone knows it; on others, and on servers, it is 0.
    """

    iterations: int
    misses: int
    overruns: int
    skipped: int = 0
    waiting: float = 0.0


class Batches(Loop):
    """Iterates over this worker's batches; every worker takes the same number of iterations.

    Each sample of an epoch counts exactly once over all workers. The size of a batch is decided right before it is
    handed out.
    """

    def statistics(self) -> LoaderStatistics:
        """Counts of what this worker's loader has done so far."""
        return LoaderStatistics(
            iterations=self.iteration,
            misses=self._misses,
            overruns=self._balancer.overruns,
            skipped=self._balancer.skipped,
            waiting=0.0 if (summary := self._balancer.summary) is None else summary.account.waiting,
        )

    def settle(self) -> None:
        """Under local SGD, average the models now if they have changed since the last average. Otherwise do nothing.

        For scripts that evaluate or save within an epoch, or that leave a loop with `break`. All workers must call it.
        """
        self.engine.settle()

    def close(self) -> None:
        """End what `prepare` started, on every worker; nothing that was prepared can be used afterwards.

        Only needed in processes that call `prepare` several times.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def weigh_by(self, count: float) -> None:
        """Weigh this batch by its part of all workers' units (tokens, pixels, class weights), instead of samples.

        For a loss that is a mean over such units: the summed gradient is then that of the mean over the union batch.
        Call it in every iteration, on every worker, between receiving the batch and backward.

        Args:
            count: The units in this worker's batch: what its loss is divided by.

        Raises:
            ConfigError: The count is negative or no number, or no batch is in hand.
        """
        self.engine.weigh_by(count, self._origin)

    def computes(self, batch: Any) -> None:
        """Say which batch the next forward passes are of. Only needed if evenstep cannot tell, and says so.

        For loops that fetch batches ahead and compute them in another form, such as packed sequences on a device.

        Args:
            batch: A batch, or a tensor of it, or a share, as it was handed out.

        Raises:
            ConfigError: It is none of the batches that were handed out and not computed.
        """
        self.engine.computes(batch)

    def note(self, **values: float | torch.Tensor) -> None:
        """Record values in the run's event log, if there is one: `loader.note(loss=loss)`.

        `evenstep report` plots each name over time and over samples. Values that several workers note in the same
        iteration are averaged, weighted by samples: with a mean loss on each worker, that is the loss of the union
        batch. Reading a tensor on a device waits for the device, so note only now and then there.

        Raises:
            ConfigError: A value is not a number or a tensor of one element.
        """
        self._balancer.note({name: _number(name, value) for name, value in values.items()})

    def mean_over_workers(self, value: Value, count: float) -> Value:
        """The mean of all workers' values, weighted by their counts: of a loss or an accuracy over uneven shares.

        All workers must call it, at the same place. All get the same bits, so they can decide on the result alike (to
        stop, or to lower the learning rate). Under parameter servers workers do not wait for each other: each gets its
        own value, and a warning.

        Args:
            value: A number, for a number, or a tensor, for a tensor of means. It may be anything if `count` is 0.
            count: The weight of this worker's value, such as `loader.current.samples`.

        Raises:
            ConfigError: A count is negative, or all counts are 0.
            WorkerLostError: A worker died or stopped, or did not call it; the message names it.
        """
        try:
            with self._balancer.interrupted():
                return mean_over_workers(self.engine.workers, value, count)
        except RuntimeError as error:
            raise self.engine.explained(error) from error

    def gather_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        """As `Session.gather`."""
        try:
            with self._balancer.interrupted():
                return gather_over_workers(self.engine.workers, values)
        except RuntimeError as error:
            raise self.engine.explained(error) from error


def _number(name: str, value: object) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"note takes numbers and tensors of one element, not {shown(value)} for {name!r}") from None

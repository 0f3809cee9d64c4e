"""Everything that a script does with a loader besides iterating: weights, metrics, notes, the end."""

from dataclasses import dataclass
from typing import Any, Self, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.data.loop import BatchLoop
from evenstep.torch.processes.workers import Value, mean_over_workers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """Counts of one worker, over all epochs of this process.

    Attributes:
        iterations: Iterations handed out.
        misses: Samples that data workers had to fetch out of turn because batch sizes changed.
        overruns: Iterations whose real compute took longer than the time to be emulated.
        skipped: Gradients, pushes or models of this worker that were left out because of a NaN or an infinity.
        waiting: The part of all workers' time, 0 to 1, spent waiting for the slowest worker, over all loaders. Only
            worker 0 knows it; on other workers, and on servers, it is 0.
    """

    iterations: int
    misses: int
    overruns: int
    skipped: int = 0
    waiting: float = 0.0


class Batches(BatchLoop):
    """A loop over this worker's batches, and what its script does besides iterating."""

    def statistics(self) -> LoaderStatistics:
        """The counts of this worker's loader so far."""
        return LoaderStatistics(
            iterations=self.iteration,
            misses=self._misses,
            overruns=0 if (hold := self._tracker.hold) is None else hold.overruns,
            skipped=self._tracker.skipped,
            waiting=0.0 if (summary := self._tracker.summary) is None else summary.account.waiting,
        )

    def settle(self) -> None:
        """Under local SGD, average the models now if they have changed since the last average. Otherwise do nothing.

        For scripts that evaluate or save within an epoch, or that leave a loop with `break`. All workers must call it.
        """
        self.engine.settle()

    def close(self) -> None:
        """End what `prepare` started, on every worker; the prepared objects cannot be used afterwards.

        Only needed in processes that call `prepare` several times, or after an asynchronous checkpoint.

        Raises:
            CheckpointError: A checkpoint that was saved asynchronously could not be written.
        """
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.__exit__(*exception)

    def weigh_by(self, count: float) -> None:
        """Weigh this batch by its part of all workers' units (tokens, pixels, class weights), instead of samples.

        For a loss that is a mean over such units: the summed gradient is then the one of the mean over the union batch.
        Call it in every iteration, on every worker, between receiving the batch and backward.

        Args:
            count: The units in this worker's batch, by which its loss is divided.

        Raises:
            ConfigError: The count is negative or not a number, or there is no current batch.
        """
        self.engine.weigh_by(count, self._origin)

    def computes(self, batch: Any) -> None:
        """Say which batch the next forward passes compute. Only needed if evenstep cannot tell; an error then says so.

        For loops that fetch batches ahead and compute them in another form, such as packed sequences on a device.

        Args:
            batch: A batch, one of its tensors, or a share, as it was handed out.

        Raises:
            ConfigError: It is not one of the batches that were handed out and not yet computed.
        """
        self.engine.computes(batch)

    def note(self, **values: float | torch.Tensor) -> None:
        """Record values in the run's event log, if there is one: `loader.note(loss=loss)`.

        `evenstep report` plots each name over time and over samples. Values that several workers note in the same
        iteration are averaged, weighted by samples: with a mean loss on each worker, that is the loss of the union
        batch. Reading a tensor on a device waits for that device, so note such values only now and then.

        Raises:
            ConfigError: A value is not a number or a tensor of one element.
        """
        self._tracker.note({name: _number(name, value) for name, value in values.items()})

    def mean_over_workers(self, value: Value, count: float) -> Value:
        """The mean of all workers' values, weighted by their counts, such as a loss or an accuracy over uneven shares.

        All workers must call it, at the same place. All get the same bits, so they reach the same decision from it (to
        stop, or to lower the learning rate). Under parameter servers, workers do not wait for each other: each gets its
        own value, with a warning.

        Args:
            value: A number or a tensor; the result has the same form. If `count` is 0, its content does not matter.
            count: The weight of this worker's value, such as `loader.current.samples`.

        Raises:
            ConfigError: A count is negative, or all counts are 0.
            WorkerLostError: A worker died or stopped, or did not call it; the message names it.
        """
        with self.engine.meeting():
            return mean_over_workers(self.engine.workers, value, count)


def _number(name: str, value: object) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"note takes numbers and tensors of one element, not {shown(value)} for {name!r}") from None

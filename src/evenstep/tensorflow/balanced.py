"""Behind a barrier: the optimizer steps on the gradient of the union of all workers' batches."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.tensorflow.source import Source
from evenstep.tensorflow.workers import Workers
from evenstep.worker.api.balancer import Balancer

if TYPE_CHECKING:
    from evenstep.worker.api.share import Share

_NO_STEP: Final = "let the optimizer step once for each batch, with optimizer.apply_gradients or optimizer.apply"


@final
class Balanced:
    """Connects the batches that are handed out to the steps of the optimizer.

    Args:
        workers: All workers.
        balancer: Shares out the samples.
        source: The samples.
        iterations: Those of an epoch.

    Attributes:
        balancer: As given.
        current: The share of the batch that was handed out last; None before the first.
    """

    def __init__(self, workers: Workers, balancer: Balancer, source: Source, iterations: int) -> None:
        self.balancer = balancer
        self.iterations = iterations
        self._workers = workers
        self._source = source
        self._epoch: Iterator[Share] = iter(())
        self.current: Share | None = None
        self._due = False
        self._handed = 0.0

    def batches(self) -> Iterator[Any]:
        """This worker's batches of the next epoch."""
        self.settle()
        self._due, epoch = False, self.balancer.epoch()
        self._epoch = epoch
        for share in epoch:
            batch = self._source.batch(share.indices)
            self.current, self._due, self._handed = share, True, time.perf_counter()
            yield batch
            if self._due:
                raise ConfigError(
                    f"a batch was asked for before the step on the last one: {_NO_STEP}, and without prefetch()"
                )
            if self._epoch is not epoch:
                return  # It was ended meanwhile.

    def settle(self) -> None:
        """End an epoch whose last step is done: `fit` counts the batches, and asks for no more than there are."""
        last = self.current is not None and self.current.iteration == self.iterations - 1
        if last and not self._due:
            next(self._epoch, None)
            self._epoch = iter(())

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """The gradients of the variables to step on, and the weight for `average`.

        They are those of the mean loss over the union batch, from those over this worker's; under `local-sgd` this
        worker's own. None stays None.
        """
        dense = [
            # The shape of a gradient is often not known before it is computed.
            None if each is None else tf.ensure_shape(tf.convert_to_tensor(each), variable.shape)
            for each, variable in zip(gradients, variables, strict=True)
        ]
        given = [each for each in dense if each is not None]
        # The elements make a device finish the gradients before the time is taken.
        elements = [tf.cast(tf.reshape(each, [-1])[:1], tf.float32) for each in given]
        weights = tf.numpy_function(self._exchange, [tf.concat(elements, 0)], tf.float64)
        weights.set_shape([2])
        if self.balancer.scheme.period is None:
            combined = iter(self._sum(given, weights[0]))
        else:
            combined = (tf.math.multiply_no_nan(each, tf.cast(weights[0], each.dtype)) for each in given)
        return [None if each is None else next(combined) for each in dense], weights[1]

    def _sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """The sums over all workers of their tensors times their weights; where that is 0, a NaN counts nothing."""
        sums: dict[int, Any] = {}
        for kind in dict.fromkeys(each.dtype for each in tensors):
            at = [number for number, each in enumerate(tensors) if each.dtype == kind]
            flat = tf.concat([tf.reshape(tensors[each], [-1]) for each in at], 0)
            flat = tf.math.multiply_no_nan(flat, tf.cast(weight, kind))
            parts = tf.split(self._workers.sum(flat), [tensors[each].shape.num_elements() for each in at])
            sums |= {each: tf.reshape(part, tensors[each].shape) for each, part in zip(at, parts, strict=True)}
        return [sums[number] for number in range(len(tensors))]

    def average(self, variables: Sequence[Any], weight: Any) -> None:
        """Set the variables of floating-point numbers to their average over all workers, if the weight is not NaN."""
        if self.balancer.scheme.period is None:
            return
        floating = [each for each in variables if tf.as_dtype(each.dtype).is_floating]

        def averaged() -> Any:
            values = self._sum([tf.convert_to_tensor(each) for each in floating], weight)
            for variable, value in zip(floating, values, strict=True):
                variable.assign(value)
            return tf.constant(True)

        tf.cond(tf.math.is_nan(weight), lambda: tf.constant(False), averaged)

    def _exchange(self, elements: Any) -> Any:
        """This worker's gradient is complete: report its time to all workers.

        Returns `Share.weight` and `Share.average`, NaN for None; float64 of shape [2].
        """
        seconds = time.perf_counter() - self._handed
        if self.current is None or not self._due:
            raise ConfigError(f"the optimizer steps without a batch of the prepared dataset in hand: {_NO_STEP}")
        self.balancer.report(seconds)
        self._due = False
        average = self.current.average
        return np.array([self.current.weight, np.nan if average is None else average])

"""The `tf.data.Dataset` of this worker's shares, and steps on the gradient of the union of all workers' batches."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, final

import numpy as np
import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.tensorflow.source import Source
from evenstep.tensorflow.workers import Peers
from evenstep.worker.api.ahead import Ahead, in_thread
from evenstep.worker.api.balanced_loader import BalancedLoader
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share
from evenstep.worker.api.share_batches import ShareBatches, refused
from evenstep.worker.replicas import Replicas

_NO_STEP: Final = (
    "let the optimizer step once for each batch, with optimizer.apply_gradients or optimizer.apply, and leave out"
    " prefetch(), shuffle(), cache() and unbatch()"
)

PREPARED: Final = "_evenstep_prepared"


def _refusal(optimizer: Any) -> str | None:
    if getattr(optimizer, PREPARED, False):
        return None
    return (
        f"the optimizer {type(optimizer).__name__} was not prepared and steps in the loop over the prepared dataset, on"
        " gradients of this worker alone: make one model of all layers, and give the prepared optimizer all gradients"
        " of a batch in one call"
    )


@final
class Balanced:
    """Connects the batches handed out to the optimizer's steps.

    Args:
        workers: All workers.
        balancer: Divides the samples.
        source: The samples.
        scaled: Whether the optimizer scales the loss. An infinity then tells it on every worker to lower the scale.
        prefetch: Whether the next batch is fetched while this one is computed.
        replicas: The weights, which all workers must have alike.

    Attributes:
        balancer: As given.
    """

    def __init__(
        self, workers: Peers, balancer: Balancer, source: Source, *, scaled: bool, prefetch: bool, replicas: Replicas
    ) -> None:
        self.balancer = balancer
        self._workers, self._scaled = workers, scaled
        ahead = Ahead[Any](
            source.batch,
            in_thread(source.batch) if prefetch else None,
            leaves=tf.nest.flatten,
            build=tf.nest.pack_sequence_as,
        )
        before = f"the step on the last one: {_NO_STEP}"
        loop = partial(refused, tf.keras.optimizers.Optimizer, "apply", _refusal) if workers.count > 1 else nullcontext
        self._batches = ShareBatches(balancer, ahead, before, loop, replicas=replicas)
        self._epoch: Iterator[Share] = iter(())
        self._loop = self._batches.of(())

    def batches(self) -> Iterator[Any]:
        """This worker's batches of the next epoch."""
        self.settle()
        self._epoch = self.balancer.epoch()
        self._loop = self._batches.of(self._epoch)
        yield from self._loop

    @property
    def current(self) -> Share | None:
        """The share of the batch that was handed out last; None before the first."""
        return self._batches.current

    def settle(self) -> None:
        """End an epoch after its last step: `fit` counts the batches, and does not ask for one more."""
        last = self.current is not None and self.current.iteration == self.balancer.iterations - 1
        if last and not self._batches.due:
            next(self._epoch, None)
            self._loop.close()

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the gradients of the variables to step on, and the weight for `average`.

        From the gradients over this worker's batch, it computes those of the mean loss over the union batch; under
        `local-sgd` they stay this worker's own. None stays None.
        """
        given = {number: each for number, each in enumerate(gradients) if each is not None}
        sparse = {number: each for number, each in given.items() if isinstance(each, tf.IndexedSlices)}
        # The shape of a gradient is often unknown before it is computed.
        dense = {
            number: tf.ensure_shape(tf.convert_to_tensor(each), variables[number].shape)
            for number, each in given.items()
            if number not in sparse
        }
        values = [*dense.values(), *(each.values for each in sparse.values())]
        # This makes a device finish the gradients before the time is taken.
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])
        weights = tf.numpy_function(self._exchange, [finite], tf.float64)
        weights.set_shape([2])
        if self.balancer.scheme.period is None:
            combined = dict(zip(dense, self._sum([*dense.values()], weights[0]), strict=True))
        else:
            combined = {number: _weighted(each, weights[0]) for number, each in dense.items()}
        combined |= {number: self._gathered(each, weights[0]) for number, each in sparse.items()}
        return [combined.get(number) for number in range(len(gradients))], weights[1]

    def _gathered(self, slices: Any, weight: Any) -> Any:
        """The slices of all workers times their weights: optimizers such as Adam treat a dense sum differently."""
        values, shape = _weighted(slices.values, weight), slices.values.shape[1:]
        if self._workers.count == 1 or self.balancer.scheme.period is not None:
            return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        rows = tf.shape(slices.indices)[0]
        counts = self._workers.sum(tf.one_hot(self._workers.rank, self._workers.count, rows))
        padding = [[0, tf.reduce_max(counts) - rows]]
        counted = tf.sequence_mask(counts)

        def together(tensor: Any, shape: Sequence[int] = ()) -> Any:
            padded = tf.pad(tensor, [*padding, *([0, 0] for _ in shape)])
            rows_of_all = self._workers.gather(tf.reshape(padded, [-1]))
            return tf.boolean_mask(tf.reshape(rows_of_all, [*tf.unstack(tf.shape(counted)), *shape]), counted)

        return tf.IndexedSlices(together(values, shape), together(slices.indices), slices.dense_shape)

    def _sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """The sums over all workers of their tensors times their weights; at weight 0, a NaN does not count."""
        sums: dict[int, Any] = {}
        for kind in dict.fromkeys(each.dtype for each in tensors):
            at = [number for number, each in enumerate(tensors) if each.dtype == kind]
            flat = tf.concat([tf.reshape(tensors[each], [-1]) for each in at], 0)
            flat = _weighted(flat, weight)
            parts = tf.split(self._workers.sum(flat), [tensors[each].shape.num_elements() for each in at])
            sums |= {each: tf.reshape(part, tensors[each].shape) for each, part in zip(at, parts, strict=True)}
        return [sums[number] for number in range(len(tensors))]

    def average(self, variables: Sequence[Any], weight: Any) -> None:
        """Set the floating-point variables to their average over all workers, if the weight is not NaN."""
        if self.balancer.scheme.period is None:
            return
        floating = [each for each in variables if tf.as_dtype(each.dtype).is_floating]

        def averaged() -> Any:
            values = self._sum([tf.convert_to_tensor(each) for each in floating], weight)
            for variable, value in zip(floating, values, strict=True):
                variable.assign(value)
            return tf.constant(True)

        tf.cond(tf.math.is_nan(weight), lambda: tf.constant(False), averaged)

    def _exchange(self, finite: Any) -> Any:
        """Report this worker's time to all workers, when its gradient is complete.

        Returns `Share.weight` and `Share.average`, NaN for None; float64 of shape [2].
        """
        if not self._batches.due:
            raise ConfigError(f"the optimizer steps without a current batch of the prepared dataset: {_NO_STEP}")
        share = self._batches.report(finite=bool(finite) or self._scaled)
        return np.array([share.weight, np.nan if share.average is None else share.average])


def _weighted(tensor: Any, weight: Any) -> Any:
    """The tensor times the weight; at weight 0, a NaN does not count."""
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


@final
class BalancedDataset(BalancedLoader, tf.data.Dataset):
    """This worker's batches. Each loop over it is the next epoch.

    It hands out one batch at a time, because the size of the next one depends on how long this one takes. So it must
    not be prefetched.

    Args:
        spec: The element spec of a batch.
        balanced: Makes the batches of the epochs, one after the other.
    """

    def __init__(self, spec: Any, balanced: Balanced) -> None:
        dataset = tf.data.Dataset.from_generator(balanced.batches, output_signature=spec)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False  # One of them prefetches.
        self._dataset = dataset.with_options(options)
        self._balanced = balanced
        super().__init__(self._dataset._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """The spec of a batch with any number of samples."""
        return self._dataset.element_spec

    def cardinality(self, name: str | None = None) -> Any:
        """The iterations of an epoch."""
        return tf.constant(self._balanced.balancer.iterations, tf.int64, name=name)

    @property
    def current(self) -> Share | None:
        """The share of the last batch handed out; if its `samples` is 0, it is a copy of another worker's sample."""
        return self._balanced.current

    def weigh_by(self, count: Any) -> None:
        """Weigh this batch by `count`, also inside a `tf.function`."""
        tf.numpy_function(self._balanced.balancer.weigh_by, [tf.cast(count, tf.float64)], [])

    def _settled(self) -> Balancer:
        self._balanced.settle()
        return self._balanced.balancer

"""The `tf.data.Dataset` of this worker's shares."""

from typing import Any, final

import tensorflow as tf

from evenstep.tensorflow.balanced import Balanced
from evenstep.worker.api.balanced_loader import BalancedLoader
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share


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

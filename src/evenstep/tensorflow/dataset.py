"""The `tf.data.Dataset` of this worker's shares."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

import numpy as np
import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.client import Client
from evenstep.worker.api.share import Share

_WANTED = (
    "give arrays, as in (inputs, labels), or an object with __len__ and a __getitem__ that returns the batch of an"
    " array of indices"
)


class Source:
    """Samples that can be asked for by their indices.

    Args:
        data: Arrays of equal length, in any nest, or an object with `__len__` and `__getitem__(indices)`.

    Raises:
        ConfigError: It is something else.
    """

    def __init__(self, data: object) -> None:
        if isinstance(data, tf.data.Dataset):
            raise ConfigError(f"a tf.data.Dataset cannot be asked for samples by their indices: {_WANTED}")
        if isinstance(data, tf.keras.utils.PyDataset):
            raise ConfigError(f"a PyDataset has batches of its own, and no samples by their indices: {_WANTED}")
        self._batch_of: Callable[[IntArray], Any]
        parts = tf.nest.flatten(data)
        if len(parts) == 1 and parts[0] is data and not hasattr(data, "shape"):
            if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
                raise ConfigError(f"the data is {shown(data)}, which cannot be indexed: {_WANTED}")
            self.length, self._batch_of = len(data), data.__getitem__
        else:
            arrays = tf.nest.map_structure(np.asarray, data)
            lengths = {len(each) if each.ndim else 0 for each in tf.nest.flatten(arrays)}
            if len(lengths) != 1 or 0 in lengths:
                raise ConfigError(f"the data has arrays of {sorted(lengths)} samples: give arrays of the same length")
            (self.length,) = lengths
            self._batch_of = lambda indices: tf.nest.map_structure(lambda each: each[indices], arrays)

    def batch(self, indices: IntArray) -> Any:
        """The samples with these indices, int64 of shape [rows]."""
        return tf.nest.map_structure(np.asarray, self._batch_of(indices))

    @property
    def spec(self) -> Any:
        """Of a batch of any number of samples."""
        return tf.nest.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), self.batch(np.zeros(1, dtype=np.int64))
        )


class Batches(Protocol):
    """This worker's batches."""

    @property
    def loop(self) -> Balancer | Client:
        """What shares out the samples."""
        ...

    @property
    def current(self) -> Share | None:
        """Of the batch that was handed out last; None before the first."""
        ...

    @property
    def iterations(self) -> int | None:
        """Those of an epoch; None if they depend on the speeds."""
        ...

    def batches(self) -> Iterator[Any]:
        """Those of the next epoch."""
        ...

    def settle(self) -> None:
        """End an epoch of which nothing is left."""
        ...


@final
class BalancedDataset(tf.data.Dataset):
    """This worker's batches. Each loop over it is the next epoch.

    It hands out one batch at a time, since the size of the next rests on how long this one takes. So it must not be
    prefetched.

    Args:
        spec: Of a batch.
        batches: Makes the batches of the epochs, one after the other.
    """

    def __init__(self, spec: Any, batches: Batches) -> None:
        dataset = tf.data.Dataset.from_generator(batches.batches, output_signature=spec)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False  # One of them prefetches.
        self._dataset = dataset.with_options(options)
        self._batches = batches
        super().__init__(self._dataset._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Of a batch of any number of samples."""
        return self._dataset.element_spec

    def cardinality(self, name: str | None = None) -> Any:
        """The iterations of an epoch."""
        known = self._batches.iterations
        return tf.constant(tf.data.UNKNOWN_CARDINALITY if known is None else known, tf.int64, name=name)

    @property
    def current(self) -> Share | None:
        """The share of the batch that was handed out last; if its `samples` are 0, it is a copy of another's sample."""
        return self._batches.current

    @property
    def next_epoch(self) -> int:
        """The epoch with which to begin or go on, as in `fit(initial_epoch=dataset.next_epoch)`."""
        return self._settled.next_epoch

    @property
    def sizes(self) -> list[int]:
        """The samples of each worker in an iteration, as last planned."""
        return self._batches.loop.sizes

    def note(self, **values: float) -> None:
        """Record values in the event log, if there is one: `dataset.note(loss=loss)`."""
        self._batches.loop.note(**values)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, and what the sizes rest on; any worker's serves all. Save the weights at the same point."""
        return self._settled.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called, also with another number of workers."""
        self._settled.load_state_dict(state)

    def close(self) -> None:
        """End the record of this worker. Only needed in processes that train several times."""
        self._settled.close()

    @property
    def _settled(self) -> Balancer | Client:
        self._batches.settle()
        return self._batches.loop

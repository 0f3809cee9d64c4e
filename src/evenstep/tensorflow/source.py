"""The samples, by their indices."""

from typing import Any, Final, final

import numpy as np
import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray
from evenstep.worker.common_data import length_of, require_rows

_PROBES: Final = 8
_WANTED = (
    "give arrays, as in (inputs, labels), or an object with __len__ and a __getitem__ that returns the batch of an"
    " array of indices"
)


@final
class Source:
    """Samples that are read by their indices.

    Args:
        data: Arrays of equal length, in any nest, or an object with `__len__` and `__getitem__(indices)`.

    Raises:
        ConfigError: `data` is something else.
    """

    def __init__(self, data: object) -> None:
        if isinstance(data, tf.data.Dataset):
            raise ConfigError(f"a tf.data.Dataset cannot be asked for samples by their indices: {_WANTED}")
        if isinstance(data, tf.keras.utils.PyDataset):
            raise ConfigError(
                f"a PyDataset has batches, and no samples that can be asked for by their indices: {_WANTED}"
            )
        # A tensor takes no arrays of indices; a table that has a shape, such as one of Hugging Face, does.
        self._data = tf.nest.map_structure(
            lambda each: np.asarray(each) if hasattr(each, "__array__") else each, _tuples(data)
        )
        self.length = length_of(tf.nest.flatten(self._data))

    def batch(self, indices: IntArray) -> Any:
        """The samples with these indices, int64 of shape [rows].

        Raises:
            ConfigError: The data did not return arrays with one row per index.
        """
        given = tf.nest.map_structure(lambda each: each[indices], self._data)
        batch = tf.nest.map_structure(np.asarray, _tuples(given))
        require_rows(tf.nest.flatten(batch), indices)
        return batch

    @property
    def spec(self) -> Any:
        """The spec of a batch with any number of samples. A dimension in which single samples differ is padded."""
        at = np.unique(np.linspace(0, self.length - 1, _PROBES, dtype=np.int64))
        probes = [self.batch(at[number : number + 1]) for number in range(len(at))]

        def spec_of(*alike: Any) -> Any:
            sizes = zip(*(each.shape[1:] for each in alike), strict=False)
            return tf.TensorSpec([None, *(one[0] if len(set(one)) == 1 else None for one in sizes)], alike[0].dtype)

        return tf.nest.map_structure(spec_of, *probes)


def _tuples(nest: Any) -> Any:
    """The nest with tuples instead of lists, which tf.data would treat as tensors."""
    if isinstance(nest, dict):
        return {name: _tuples(part) for name, part in nest.items()}
    if type(nest) in (list, tuple):
        return tuple(map(_tuples, nest))
    return nest

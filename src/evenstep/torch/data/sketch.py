"""Sketches a few samples of a dataset, so that workers notice datasets that are not the same."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from evenstep.core.sketch import MAX_ELEMENTS, Leaf, Sketch, leaf_of
from evenstep.torch.data.randomness import seeded_randomness
from evenstep.torch.data.sampling import Positions
from evenstep.torch.data.shards import ShardedDataset
from evenstep.worker.common_data import require_alike

_MAX_LEAVES: Final = 32
_MAX_DEPTH: Final = 8
_MAX_PARTS: Final = 256
_ADVICE: Final = (
    'give all workers the same dataset; or, for data that stay with their workers, partition="private" with local-sgd;'
    ' or partition="common" if the datasets are the same'
)
_OTHERS: Final = sys.stdlib_module_names | {"numpy", "torch"}


def require_common(
    loader: DataLoader[Any],
    records: Sequence[Mapping[str, Any]],
    exchange: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
    rank: int,
) -> None:
    """Check that all workers have the same dataset, by the `sketch` in their records.

    All workers must call it together. Errors as for `require_alike`.
    """
    require_alike(
        [msgspec.convert(record["sketch"], Sketch) for record in records],
        exchange,
        rank,
        again=lambda: sketch_of(loader),
        advice=_ADVICE,
    )


def sketch_of(loader: DataLoader[Any]) -> Sketch:
    """The sketch of the first, the middle and the last sample of the loader's dataset; empty if there is none.

    Neither the script's random numbers nor the dataset's attributes are changed: data workers must not inherit the
    files that many a dataset opens at its first sample.
    """
    dataset = loader.dataset
    if isinstance(dataset, Positions):
        return ()
    if isinstance(dataset, ShardedDataset):  # A sample would cost a whole shard.
        return tuple(_leaves(list(dataset.lengths), 1))
    try:
        return _sketch(dataset)
    except Exception:  # Training meets it again, if it is an error of the dataset at all.
        return ()


def _sketch(dataset: Any) -> Sketch:
    length = len(dataset)
    leaves: list[Leaf] = []
    with unaltered(dataset):
        for index in dict.fromkeys((0, length // 2, length - 1)):
            with seeded_randomness(0, index):
                leaves.extend(islice(_leaves(_sample(dataset, index), _MAX_DEPTH), _MAX_LEAVES))
    return tuple(leaves)


def _sample(dataset: Any, index: int) -> Any:
    fetch = getattr(dataset, "__getitems__", None)
    return fetch([index])[0] if callable(fetch) else dataset[index]


@contextmanager
def unaltered(given: Any) -> Iterator[None]:
    """Afterwards the attributes of a dataset or sampler, and of its parts, are what they were; generators too."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    generators: list[tuple[Callable[[Any], object], Any]] = []
    waiting, seen = [given], {id(given)}
    while waiting:
        attributes = getattr(waiting.pop(), "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        kept.append((attributes, dict(attributes)))
        for value in attributes.values():
            generators.extend(_state_of(value))
            parts = value if isinstance(value, list | tuple) and len(value) <= _MAX_LEAVES else (value,)
            new = [each for each in parts if _is_users(each) and id(each) not in seen]
            seen.update(map(id, new))
            waiting.extend(new[: max(0, _MAX_PARTS - len(seen))])
    try:
        yield
    finally:
        for attributes, before in kept:
            if attributes.keys() != before.keys() or any(attributes[name] is not before[name] for name in before):
                attributes.clear()
                attributes.update(before)
        for restore, state in generators:
            restore(state)


def _is_users(value: Any) -> bool:
    """Whether it is an object whose attributes may be put back, and no lock, thread or the like."""
    kind = type(value)
    if isinstance(value, type | ModuleType | torch.nn.Module) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, Dataset | Sampler) or kind.__module__.partition(".")[0] not in _OTHERS


def _state_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """How to set the state of a random number generator, and its state now; nothing for other objects."""
    if isinstance(value, torch.Generator):
        yield value.set_state, value.get_state()
    elif isinstance(value, random.Random):
        yield value.setstate, value.getstate()
    elif isinstance(value, np.random.RandomState):
        yield value.set_state, value.get_state()
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        yield lambda state: setattr(bits, "state", state), bits.state


def _leaves(value: Any, depth: int) -> Iterator[Leaf]:
    """The leaves of a sample in a defined order, without those that cannot be compared."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        if b"/" not in text and b"\\" not in text:  # The path of a file may differ.
            yield Leaf(kind="text", digest=zlib.crc32(text))
    elif isinstance(value, Mapping | list | tuple):
        yield from _of_parts(value, depth - 1)
    elif isinstance(value, np.ndarray | np.generic | bool | int | float) or hasattr(value, "__array_interface__"):
        array = np.asarray(value)  # Also of an image of PIL.
        yield from _of_array(_thinned(array.reshape(-1)), array.shape)


def _of_parts(value: Any, depth: int) -> Iterator[Leaf]:
    if depth < 0:
        return
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], depth)
    elif value and all(type(each) in (int, float, bool) for each in value):
        yield from _leaves(np.asarray(value), depth)
    else:
        for each in value:
            yield from _leaves(each, depth)


def _of_tensor(value: torch.Tensor) -> Iterator[Leaf]:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        return
    flat = _thinned(value.detach().reshape(-1))
    flat = flat.float() if flat.dtype is torch.bfloat16 else flat
    yield from _of_array(flat.cpu().resolve_conj().resolve_neg().numpy(), value.shape)


def _thinned(flat: Any) -> Any:
    """At most this many of the elements, evenly spaced."""
    return flat[:: max(1, -(-len(flat) // MAX_ELEMENTS))]


def _of_array(flat: Any, shape: Sequence[int]) -> Iterator[Leaf]:
    leaf = leaf_of(flat, shape)
    if leaf is not None:
        yield leaf

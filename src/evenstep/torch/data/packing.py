"""The messages of data workers: samples packed into bytes, and rows of collated chunks that are joined again."""

import copy
import io
import pickle
from collections.abc import MutableMapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, final

import numpy as np
import torch


def joined(pieces: list[tuple[Any, int]]) -> Any:
    """Join rows of default-collated chunks, given as (chunk, row), into one default-collated batch."""
    runs: list[tuple[Any, list[int]]] = []
    for chunk, row in pieces:
        if runs and runs[-1][0] is chunk:
            runs[-1][1].append(row)
        else:
            runs.append((chunk, [row]))
    return _joined(runs)


def pack(samples: list[Any]) -> bytes:
    """Pack samples into bytes: each tensor sent by itself would need a file descriptor."""
    packed = io.BytesIO()
    _CompactPickler(packed, pickle.HIGHEST_PROTOCOL).dump(samples)
    return packed.getvalue()


@final
class ByValue:
    """A batch whose small tensors are sent as bytes; it is unpickled as the plain batch.

    PyTorch sends a file descriptor for each tensor, through a separate connection, which takes longer than copying
    a hundred kilobytes.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        sent = io.BytesIO()
        _ByValuePickler(sent, pickle.HIGHEST_PROTOCOL).dump(self._batch)
        return pickle.loads, (sent.getvalue(),)


@final
class _ByValuePickler(ForkingPickler):
    """Pickles like a queue between processes, except for small tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_small(value) and _is_array(value):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def is_small(tensor: torch.Tensor, count: int = 1) -> bool:
    """True if `count` such tensors are sent by value."""
    return tensor.layout is torch.strided and not tensor.is_nested and count * tensor.nbytes <= _MAX_BY_VALUE


_MAX_BY_VALUE: Final = 2**17


@final
class _CompactPickler(pickle.Pickler):
    """Packs only the elements in a tensor's view.

    A sample of an in-memory dataset is a view (`self.x[i]`), for which pickle would pack the whole dataset's storage.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            return NotImplemented  # The parts of a sparse tensor arrive here one by one.
        stored = value.untyped_storage().nbytes()
        if _is_array(value) and value.nbytes <= stored:
            return torch.from_numpy, (value.numpy(),)  # Ten times as fast as a tensor.
        if value.nbytes >= stored:
            return NotImplemented
        compact = value.detach().clone()
        if type(compact) is not type(value):
            return NotImplemented
        compact.requires_grad_(value.requires_grad)
        vars(compact).update(vars(value))
        return compact.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def _is_array(tensor: torch.Tensor) -> bool:
    """True if a NumPy array can hold all of it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _ARRAYS
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


_ARRAYS: Final = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def _joined(runs: list[tuple[Any, list[int]]]) -> Any:
    first = runs[0][0]
    if isinstance(first, torch.Tensor):
        return torch.cat([_rows(chunk, rows) for chunk, rows in runs])
    if isinstance(first, MutableMapping):
        joined = copy.copy(first)  # Keeps the type, as default_collate does.
        joined.update({name: _joined([(chunk[name], rows) for chunk, rows in runs]) for name in first})
        return joined
    if first and isinstance(first[0], str | bytes) and not hasattr(first, "_fields"):
        return type(first)(chunk[row] for chunk, rows in runs for row in rows)
    fields = [_joined([(chunk[field], rows) for chunk, rows in runs]) for field in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*fields)
    return type(first)(fields)


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor[torch.from_numpy(np.array(rows))]

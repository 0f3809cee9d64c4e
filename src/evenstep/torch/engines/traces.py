"""Recognises the batch that was handed out in the inputs of a model."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, final
from weakref import ref

import torch
from torch.utils._pytree import tree_leaves

from evenstep.core.samples import Share
from evenstep.worker.hand_outs import HandedOut

_TENSORS: Final = {torch.Tensor}
_SHAPE: Final = attrgetter("shape")


def tensors_of(values: Any) -> Sequence[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, such as the BatchEncoding of Transformers."""
    if isinstance(values, torch.Tensor):
        return (values,)
    if type(values) in (list, tuple) and set(map(type, values)) == _TENSORS:
        return list(values)
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # PyTorch flattens dict, but no other mapping.
            found += tensors_of(list(leaf.values()))
    return found


@final
class Traces:
    """The features that identify a batch: its tensors' memory and shapes, and its length; for a share, only its length.

    Memory that it shares with the batch before, such as a mask that comes with each batch, tells nothing. The
    references keep no data. PyTorch keeps the Python object of a storage as long as the storage.

    Attributes:
        own: References to the storages that the batches next to it do not have.
    """

    __slots__ = ("_all", "_length", "_shapes", "_share", "_tensors", "own")

    def __init__(self, batch: Any, length: int, before: "Traces | None" = None) -> None:
        tensors = tensors_of(batch)
        self._share = batch if isinstance(batch, Share) else None
        self._tensors = [*map(ref, tensors)]
        self._shapes = [*map(_SHAPE, tensors)]
        self._all = self.own = frozenset(map(ref, _storages(tensors)))
        self._length = length
        if before is not None and not self._all.isdisjoint(before._all):
            self.own, before.own = self.own - before._all, before.own - self._all

    @property
    def shapes(self) -> frozenset[torch.Size]:
        """The shapes of its tensors."""
        return frozenset(self._shapes)

    @property
    def length(self) -> int | None:
        """The first axis of all its tensors, or the positions of a share; None if there is no such length."""
        plain = {shape[0] if shape else -1 for shape in self._shapes} == {self._length}
        return self._length if plain or self._share is not None else None

    def of(self, batch: Any) -> bool:
        """True if this is the batch, or one of its tensors, as it was handed out."""
        if self._share is not None:
            return batch is self._share
        tensors = tensors_of(batch)
        if self.own:
            return self.same(frozenset(map(ref, _storages(tensors))))
        return bool(tensors) and {*map(id, tensors)} <= {id(each()) for each in self._tensors}

    def same(self, storages: frozenset[ref[Any]]) -> bool:
        """True if one of its own tensors lies in this memory."""
        return not storages.isdisjoint(self.own)


@final
class Inputs:
    """The inputs of a forward pass, as evidence for the batch that it computes."""

    def __init__(self, values: Any) -> None:
        self._values = values

    @cached_property
    def _tensors(self) -> Sequence[torch.Tensor]:
        return tensors_of(self._values)

    @cached_property
    def _storages(self) -> frozenset[ref[Any]]:
        return frozenset(map(ref, _storages(self._tensors)))

    def same(self, batch: HandedOut) -> bool:
        """True if some input lies in this batch's memory."""
        return bool(batch.traces.same(self._storages))

    def foreign(self, batch: HandedOut) -> bool:
        """True if it has other rows than the batch: neither its memory, nor its length or a multiple in two axes."""
        length, shapes = batch.traces.length, _shapes(self._tensors)
        rows = [axis % length for shape in shapes for axis in shape[:2]] if length else []
        return bool(rows) and all(rows) and not self.same(batch)

    def alike(self, batches: Sequence[HandedOut]) -> list[HandedOut]:
        """The batches that share a tensor's shape with it, or else those whose length is its first axis.

        A shape that all batches have tells nothing, unless all their shapes are the same.
        """
        shapes, forms = _shapes(self._tensors), [each.traces.shapes for each in batches]
        common = frozenset.intersection(*forms) if len(set(forms)) > 1 else frozenset()
        shaped = [each for each, form in zip(batches, forms, strict=True) if (form - common) & shapes]
        lengths = {shape[0] for shape in shapes if shape}
        return shaped or [each for each in batches if each.traces.length in lengths]


def _storages(tensors: Sequence[torch.Tensor]) -> Iterable[torch.UntypedStorage]:
    """The storages of the tensors that have memory of their own."""
    try:
        return [*map(torch.Tensor.untyped_storage, tensors)]
    except RuntimeError:  # Some are sparse, for example.
        return [each.untyped_storage() for each in tensors if each.layout is torch.strided and not each.is_nested]


def _shapes(tensors: Sequence[torch.Tensor]) -> frozenset[torch.Size]:
    return frozenset([each.shape for each in tensors])

"""Recognises the batch that was handed out in the inputs of a model."""

from collections.abc import Mapping, Sequence
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
        all: References to the storages of its tensors.
        own: The same without those that the batches next to it have, too.
    """

    __slots__ = ("_length", "_shapes", "_share", "_tensors", "all", "own")

    def __init__(self, batch: Any, length: int = 0, before: "Traces | None" = None) -> None:
        tensors = tensors_of(batch)
        try:
            storages = [*map(torch.Tensor.untyped_storage, tensors)]
        except RuntimeError:  # Some have no memory of their own: they are sparse, for example.
            dense = (each for each in tensors if each.layout is torch.strided and not each.is_nested)
            storages = [*map(torch.Tensor.untyped_storage, dense)]
        self._share = batch if isinstance(batch, Share) else None
        self._tensors = [*map(ref, tensors)]
        self._shapes = [*map(_SHAPE, tensors)]
        self.all = self.own = frozenset(map(ref, storages))
        self._length = length
        if before is not None and not self.all.isdisjoint(before.all):
            self.own, before.own = self.own - before.all, before.own - self.all

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
        if self.own:
            return not self.own.isdisjoint(Traces(batch).all)
        tensors = tensors_of(batch)
        return bool(tensors) and {*map(id, tensors)} <= {id(each()) for each in self._tensors}


@final
class Inputs:
    """The inputs of a forward pass, as evidence for the batch that it computes."""

    def __init__(self, values: Any) -> None:
        self._values = values

    @cached_property
    def _traces(self) -> Traces:
        return Traces(self._values)

    def same(self, batch: HandedOut) -> bool:
        """True if some input lies in this batch's memory."""
        return not self._traces.all.isdisjoint(batch.traces.own)

    def foreign(self, batch: HandedOut) -> bool:
        """True if it has other rows than the batch: neither its memory, nor its length or a multiple in two axes."""
        length, shapes = batch.traces.length, self._traces.shapes
        rows = [axis % length for shape in shapes for axis in shape[:2]] if length else []
        return bool(rows) and all(rows) and not self.same(batch)

    def alike(self, batches: Sequence[HandedOut]) -> list[HandedOut]:
        """The batches that share a tensor's shape with it, or else those whose length is its first axis.

        A shape that all batches have tells nothing, unless all their shapes are the same.
        """
        shapes, forms = self._traces.shapes, [each.traces.shapes for each in batches]
        common = frozenset.intersection(*forms) if len(set(forms)) > 1 else frozenset()
        shaped = [each for each, form in zip(batches, forms, strict=True) if (form - common) & shapes]
        lengths = {shape[0] for shape in shapes if shape}
        return shaped or [each for each in batches if each.traces.length in lengths]

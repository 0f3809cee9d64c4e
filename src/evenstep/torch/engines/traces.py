"""Recognises the batch that was handed out in what a model is given."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.utils._pytree import tree_leaves

from evenstep.core.samples import Share
from evenstep.worker.hand_outs import HandedOut

_TENSORS: Final = {torch.Tensor}


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, such as the BatchEncoding of Transformers."""
    if isinstance(values, torch.Tensor):
        return [values]
    if type(values) in (list, tuple) and set(map(type, values)) == _TENSORS:
        return list(values)
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # PyTorch takes dict apart, and no other mapping.
            found += tensors_of(list(leaf.values()))
    return found


def _dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a memory of their own."""
    return [each for each in tensors if each.layout is torch.strided and not each.is_nested]


@final
class Traces:
    """What a batch is recognised by: its tensors' memory and shapes, and its length; a share by its length alone.

    Memory that it shares with the batch before, such as that of a mask that comes with each batch, tells nothing.

    """

    __slots__ = ("_all", "_length", "_own", "_places", "_references", "_shapes", "_share")
    _forget = torch.UntypedStorage._free_weak_ref  # The module may be gone when the process ends.

    def __init__(self, batch: Any, length: int, before: "Traces | None" = None) -> None:
        tensors = tensors_of(batch)
        self._share = batch if isinstance(batch, Share) else None
        dense = _dense(tensors)
        # As torch.multiprocessing's StorageWeakRef: they keep the addresses from being used again, and no data.
        self._references: list[Any] = [each.untyped_storage()._weak_ref() for each in dense]
        self._all = self._own = frozenset(self._references)
        self._places = _places(dense)
        self._shapes = [each.shape for each in tensors]
        self._length = length
        if before is not None and not self._all.isdisjoint(before._all):
            self._own, before._own = self._own - before._all, before._own - self._all

    def __del__(self) -> None:
        for each in self._references:
            self._forget(each)  # type: ignore[no-untyped-call]

    @property
    def shapes(self) -> frozenset[torch.Size]:
        """The shapes of its tensors."""
        return frozenset(self._shapes)

    @property
    def length(self) -> int | None:
        """The first axis of all its tensors, or the positions of a share; None if there is no such length."""
        plain = {shape[0] if shape else -1 for shape in self._shapes} == {self._length}
        return self._length if plain or self._share is not None else None

    @property
    def kept(self) -> bool:
        """Whether anything still refers to its own tensors."""
        return not all(map(torch.UntypedStorage._expired, self._own))

    def of(self, batch: Any) -> bool:
        """Whether this is the batch, or a tensor of it, as it was handed out."""
        if self._share is not None:
            return batch is self._share
        tensors = tensors_of(batch)
        return self.same(_addresses(tensors)) or (
            bool(tensors) and not self._own and set(_places(_dense(tensors))) <= set(self._places)
        )

    def same(self, addresses: frozenset[int]) -> bool:
        """Whether one of its own tensors lies in this memory."""
        return not addresses.isdisjoint(self._own)


@final
class Inputs:
    """What a forward pass was given, as evidence for the batch that it is of."""

    def __init__(self, values: Any) -> None:
        self._tensors = tensors_of(values)
        self._addresses = _addresses(self._tensors)

    def same(self, batch: HandedOut) -> bool:
        """Whether some of it lies in this batch's memory."""
        return bool(batch.traces.same(self._addresses))

    def foreign(self, batch: HandedOut) -> bool:
        """Whether it is of other rows than the batch: neither its memory, nor its length or a multiple in two axes."""
        length, shapes = batch.traces.length, _shapes(self._tensors)
        rows = [axis % length for shape in shapes for axis in shape[:2]] if length else []
        return bool(rows) and all(rows) and not self.same(batch)

    def alike(self, batches: Sequence[HandedOut]) -> list[HandedOut]:
        """The batches of which it has a tensor's shape, or if there is none, the length as its first axis.

        A shape that all batches have tells nothing, unless they differ in none.
        """
        shapes, forms = _shapes(self._tensors), [each.traces.shapes for each in batches]
        common = frozenset.intersection(*forms) if len(set(forms)) > 1 else frozenset()
        shaped = [each for each, form in zip(batches, forms, strict=True) if (form - common) & shapes]
        lengths = {shape[0] for shape in shapes if shape}
        return shaped or [each for each in batches if each.traces.length in lengths]


def _addresses(tensors: list[torch.Tensor]) -> frozenset[int]:
    """Where the tensors lie."""
    return frozenset([each.untyped_storage()._cdata for each in _dense(tensors)])


def _shapes(tensors: list[torch.Tensor]) -> frozenset[torch.Size]:
    return frozenset([each.shape for each in tensors])


def _places(tensors: list[torch.Tensor]) -> list[tuple[int, torch.Size]]:
    return [(each.data_ptr(), each.shape) for each in tensors]

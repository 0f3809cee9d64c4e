"""Recognises the batch that was handed out in what a model is given."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from evenstep.core.samples import Share
from evenstep.worker.hand_outs import HandedOut


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, such as the BatchEncoding of Transformers."""
    if isinstance(values, torch.Tensor):
        return [values]
    if type(values) in (list, tuple):
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        if len(tensors) == len(values):
            return tensors
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # PyTorch takes dict apart, and no other mapping.
            found += tensors_of(list(leaf.values()))
    return found


def _storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tensors if each.layout is torch.strided and not each.is_nested]


@final
class Traces:
    """What a batch is recognised by: its tensors' memory and shapes, and its length; a share by its length alone.

    Memory that it shares with the batch before, such as that of a mask that comes with each batch, tells nothing.

    Attributes:
        shapes: The shapes of its tensors.
        length: The first axis of all its tensors, or the positions of a share; None if there is no such length.
    """

    def __init__(self, batch: Any, length: int, before: "Traces | None" = None) -> None:
        tensors = tensors_of(batch)
        self._share = batch if isinstance(batch, Share) else None
        # Weak references keep the addresses from being used again, and no data.
        self._all = {each._cdata: StorageWeakRef(each) for each in _storages(tensors)}  # type: ignore[no-untyped-call]
        self._own = self._all.copy()
        self._places = _places(tensors)
        self.shapes = _shapes(tensors)
        plain = bool(self.shapes) and {shape[0] if shape else -1 for shape in self.shapes} == {length}
        self.length = length if plain or self._share is not None else None
        if before is not None and not self._all.keys().isdisjoint(before._all):
            for address in self._all.keys() & before._all.keys():
                self._own.pop(address, None)
                before._own.pop(address, None)

    @property
    def kept(self) -> bool:
        """Whether anything still refers to its own tensors."""
        return not all(each.expired() for each in self._own.values())  # type: ignore[no-untyped-call]

    def of(self, batch: Any) -> bool:
        """Whether this is the batch, or a tensor of it, as it was handed out."""
        if self._share is not None:
            return batch is self._share
        tensors = tensors_of(batch)
        return self.same(_addresses(tensors)) or (bool(tensors) and not self._own and _places(tensors) <= self._places)

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
    return frozenset(
        [each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided and not each.is_nested]
    )


def _shapes(tensors: list[torch.Tensor]) -> frozenset[torch.Size]:
    return frozenset([each.shape for each in tensors])


def _places(tensors: list[torch.Tensor]) -> frozenset[tuple[int, torch.Size]]:
    return frozenset([(each.data_ptr(), each.shape) for each in tensors if each.layout == torch.strided])

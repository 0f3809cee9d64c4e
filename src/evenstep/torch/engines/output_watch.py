"""Looks at the gradient that arrives at a model's logits, in hooks that change nothing and keep no graph alive."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Final, NamedTuple, final

import torch

_LARGEST: Final = 2**14
"""Elements of an output that are looked at, so that what is kept and computed is small ..."""
_FEWEST: Final = 32
"""... but at least so many samples or positions with all of their classes, or noise is all that is seen."""


class Wrong(NamedTuple):
    """How wrong the logits of an iteration were, and by how much they were too large, as `core.divergence` has them."""

    error: float
    excess: float


@final
class OutputWatch:
    """Adds up what backward brings to the logits among a model's outputs, until it is taken.

    Logits are known by their gradient: a softmax depends on no constant that is added to all of them, so that the
    gradient of any loss that rests on one adds up to 0. Other outputs, such as a regression's, are not counted. Nor is
    anything under float16, whose gradients are multiplied by a loss scale that comes and goes.
    """

    def __init__(self) -> None:
        self._arrived: list[tuple[tuple[torch.Tensor, ...], float, float]] = []

    def watch(self, outputs: object) -> None:
        """The outputs of a forward pass whose backward may follow."""
        # Whatever is odd about an output or its gradient, here and below, is no reason for the script to fail.
        with suppress(Exception):
            for output in _tensors(outputs):
                # What has no axis of classes beside that of samples is a loss, or no logits.
                if output.grad_fn is not None and output.dim() > 1 and output.numel() and not _loss_is_scaled(output):
                    self._watch(output)

    def _watch(self, output: torch.Tensor) -> None:
        kept, part = output.detach(), None
        if output.numel() > _LARGEST:
            part = _part(output.shape)
            kept = kept[part]
        # A copy: the script may change the output in place, and a view would keep all of it.
        kept = kept.flatten().to(torch.float32, copy=True)
        parts = output.numel() / kept.numel()
        # Of each element, which in part cancels out.
        rounding = max(1e-5, torch.finfo(output.dtype).eps / 4)

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # An output of several that the loss does not rest on.
                return
            with suppress(Exception):
                seen = gradient.detach()
                seen = (seen if part is None else seen[part]).flatten().float()
                # Not as numbers yet, for which a GPU would have to be waited for.
                sums = (torch.linalg.vector_norm(seen, 1), torch.dot(seen, kept), seen.sum())
                self._arrived.append((sums, parts, rounding))

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    def take(self) -> Wrong | None:
        """The mean over what has arrived since the last time; None where no gradient of logits has."""
        arrived, self._arrived = self._arrived, []
        errors, along = [], 0.0
        for sums, parts, rounding in arrived:
            size, product, total = (each.item() for each in sums)
            if abs(total) <= rounding * size:
                errors.append(size * parts)
                along += product * parts
        size = sum(errors)
        if not size or not math.isfinite(size + along):
            return None
        return Wrong(error=size / len(errors), excess=along / size)

    def forget(self) -> None:
        """What has arrived is of a batch that is not pushed."""
        self._arrived.clear()


def _tensors(outputs: object) -> Iterator[torch.Tensor]:
    """The real tensors in what a model returns: itself, or in tuples, lists, mappings and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each)
    elif isinstance(outputs, (tuple, list)):
        for each in outputs:
            yield from _tensors(each)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        for field in fields(outputs):
            yield from _tensors(getattr(outputs, field.name))


def _part(shape: torch.Size) -> tuple[slice, ...]:
    """The first samples, as many as there is room for; of a sample that is too large, the first positions.

    Classes are the last axis of three (samples, positions, classes), and the second of more (images), as usual.
    """
    sizes, classes = list(shape), {2: 1, 3: 2}.get(len(shape), 1)
    room = max(_LARGEST, _FEWEST * sizes[classes])
    for axis in range(len(sizes)):
        if axis != classes:
            sizes[axis] = min(sizes[axis], max(1, sizes[axis] * room // math.prod(sizes)))
    return tuple(slice(size) for size in sizes)


def _loss_is_scaled(output: torch.Tensor) -> bool:
    """Whether the loss has to be multiplied, so that its gradient does not vanish."""
    device = output.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.float16 in (output.dtype, autocast)

"""The weighted average of models and optimizers over all workers."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

_CHUNK_BYTES: Final = 32 * 2**20
_MIN_BYTES: Final = 4


def averaged_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What is averaged: parameters, buffers and optimizer state, by name and in the same order on every worker.

    Integers are left out, and so are the optimizers' counts of steps (`step_counts`).
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        weights = ((name, weight.detach()) for name, weight in model.named_parameters() if weight.requires_grad)
        tensors.update({f"{index} {name}": tensor for name, tensor in (*weights, *model.named_buffers())})
    for number, state in enumerate(_states(optimizers)):
        keys = [key for key in sorted(state) if key != "step" and torch.is_tensor(state[key])]
        tensors.update({f"state {number} {key}": state[key] for key in keys})
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The state of each parameter of each optimizer."""
    return [
        optimizer.state.get(parameter, {})
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def step_counts(optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor:
    """How often each parameter has been stepped, for optimizers that count it (such as Adam): float64, on the CPU."""
    counts = [torch.as_tensor(state["step"]) for state in _states(optimizers) if "step" in state]
    if not counts:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([count.to(counts[0].device) for count in counts]).to("cpu", torch.float64)


def agree_on_step_counts(
    optimizers: Sequence[torch.optim.Optimizer], counts: torch.Tensor, *, counted: bool, group: dist.ProcessGroup
) -> None:
    """Set each parameter's count of steps to the largest of the workers that are `counted`.

    A worker that had no samples, or skipped a step, is behind, but its averaged moments are as old as the others', and
    Adam corrects them by this count. The largest is what one process counts, and no count ever falls.

    Raises:
        RuntimeError: The collective failed.
    """
    agreed = counts.clone() if counted else torch.zeros_like(counts)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    states = [state for state in _states(optimizers) if "step" in state]
    for state, count in zip(states, agreed.tolist(), strict=True):
        if torch.is_tensor(state["step"]):
            state["step"].fill_(count)
        else:
            state["step"] = type(state["step"])(count)


def digest(value: object) -> int:
    """63 bits of what the value's `repr` shows, by which workers see whether theirs are the same."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) >> 1


def average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over all workers of weight times tensor, in place.

    The weights of all workers sum to 1. A worker of weight 0 does not count, even if it holds a NaN.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.element_size() < _MIN_BYTES:
            flat = flat.float()  # A weight times a 16-bit number would lose bits in every average.
        flat = flat.mul_(weight) if weight else flat.zero_()
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(chunk, torch.split(flat, [each.numel() for each in chunk]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of the same kind: small tensors share a message, without a copy of everything at once."""
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        unlike = chunk and (tensor.dtype, tensor.device) != (chunk[0].dtype, chunk[0].device)
        if unlike or (chunk and held + tensor.nbytes > _CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += tensor.nbytes
    if chunk:
        yield chunk

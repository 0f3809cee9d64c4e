"""The weighted average of models and optimizers over all workers."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_CHUNK_BYTES = 32 * 2**20
_MIN_BYTES = 4


def averaged_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What an average is taken of, by name and in the same order on every worker: parameters, buffers, optimizer state.

    Numbers that are no averages are left out: integers, and the optimizers' own counts of steps (`step_counts`).
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        weights = ((name, weight.detach()) for name, weight in model.named_parameters() if weight.requires_grad)
        tensors.update({f"{index} {name}": tensor for name, tensor in (*weights, *model.named_buffers())})
    for name, state in _states(optimizers):
        tensors.update(
            {f"{name} {key}": state[key] for key in sorted(state) if key != "step" and torch.is_tensor(state[key])}
        )
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of each parameter of each optimizer, with a name."""
    for index, optimizer in enumerate(optimizers):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            yield f"optimizer {index} {number}", optimizer.state.get(parameter, {})


def step_counts(optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor:
    """How often each parameter has been stepped, by optimizers that count it (Adam does): float64, on the CPU."""
    counts = [torch.as_tensor(state["step"]) for _, state in _states(optimizers) if "step" in state]
    if not counts:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([count.to(counts[0].device) for count in counts]).to("cpu", torch.float64)


def agree_on_step_counts(
    optimizers: Sequence[torch.optim.Optimizer], counts: torch.Tensor, *, counted: bool, group: dist.ProcessGroup
) -> None:
    """Set each parameter's count of steps to the largest of those workers that are `counted`.

    A worker that had nothing to compute on, or skipped a step, is behind. Its averaged moments are as old as everybody
    else's, and Adam corrects them by this count. The largest is what one process counts, and no count ever falls.

    Raises:
        RuntimeError: The collective failed.
    """
    agreed = counts.clone() if counted else torch.zeros_like(counts)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    states = [state for _, state in _states(optimizers) if "step" in state]
    for state, count in zip(states, agreed.tolist(), strict=True):
        if torch.is_tensor(state["step"]):
            state["step"].fill_(count)
        else:
            state["step"] = type(state["step"])(count)


def digest(named: Mapping[str, torch.Tensor]) -> int:
    """63 bits of the names and shapes, by which workers see that they average the same."""
    return _hashed([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()])


def digest_of_counts(counts: torch.Tensor) -> int:
    """63 bits of the counts, by which workers see whether theirs are alike."""
    return _hashed(counts.tolist())


def _hashed(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest()) >> 1


def average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over all workers of weight times tensor, in place.

    The weights of all workers sum to 1; a worker of weight 0 does not count, not even where it holds a NaN.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.element_size() < _MIN_BYTES:
            flat = flat.float()  # A weight times a 16-bit number would lose bits in every average.
        flat = flat.mul_(weight) if weight else flat.zero_()
        dist.all_reduce(flat, group=group)
        start = 0
        for tensor in chunk:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one kind put together, so that small tensors share a message and no copy of everything is made."""
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        unlike = chunk and (tensor.dtype, tensor.device) != (chunk[0].dtype, chunk[0].device)
        if unlike or (chunk and held + size > _CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += size
    if chunk:
        yield chunk

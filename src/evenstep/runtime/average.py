"""The weighted average of models and optimizers over all workers."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

_CHUNK_BYTES = 32 * 2**20
_LEAST_BYTES = 4


def averaged_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What an average is taken of, by name and in the same order on every worker: parameters, buffers, optimizer state.

    Numbers that are no averages are left alone: integers, and the optimizers' own counts of steps, which are alike.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        weights = ((name, weight.detach()) for name, weight in model.named_parameters() if weight.requires_grad)
        tensors.update({f"{index} {name}": tensor for name, tensor in (*weights, *model.named_buffers())})
    for index, optimizer in enumerate(optimizers):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            tensors.update(
                {
                    f"optimizer {index} {number} {name}": state[name]
                    for name in sorted(state)
                    if name != "step" and torch.is_tensor(state[name])
                }
            )
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def digest(named: Mapping[str, torch.Tensor]) -> int:
    """63 bits of the names and shapes, by which workers see that they average the same."""
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over all workers of weight times tensor, in place.

    The weights of all workers sum to 1; a worker of weight 0 does not count, not even where it holds a NaN.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.element_size() < _LEAST_BYTES:
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

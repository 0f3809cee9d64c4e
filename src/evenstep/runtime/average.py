"""The weighted average of models and optimizers over all workers."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_CHUNK_BYTES = 32 * 2**20


def averaged_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """What an average is taken of, in the same order on every worker: parameters, buffers and the optimizers' state.

    Numbers that are no averages are left alone: integers, and the optimizers' own counts of steps, which are alike.
    """
    tensors = [parameter.detach() for model in models for parameter in model.parameters() if parameter.requires_grad]
    tensors += [buffer for model in models for buffer in model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                tensors += [state[name] for name in sorted(state) if name != "step" and torch.is_tensor(state[name])]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over all workers of weight times tensor, in place.

    The weights of all workers sum to 1; a worker of weight 0 does not count, not even where it holds a NaN.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
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

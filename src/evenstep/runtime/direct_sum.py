"""Sums a small tensor over all workers in two hops, where Gloo's all-reduce takes 2 (N - 1) of them round a ring.

A ring moves the fewest bytes at once, which is right for large tensors. For a small one each hop costs a wake-up and
little else. Measured in benchmarks/RESULTS.md (all_reduce).
"""

from typing import Final, final

import torch
import torch.distributed as dist

from evenstep.runtime.workers import Workers

_LARGEST_PART_BYTES: Final = 64 * 1024


def suits(tensor: torch.Tensor, workers: Workers) -> bool:
    """Whether two hops are likely to be faster than a ring: CPU, more than two workers, small parts."""
    part = tensor.numel() * tensor.element_size() / workers.count
    return tensor.device.type == "cpu" and workers.count > 2 and part <= _LARGEST_PART_BYTES


@final
class DirectSum:
    """One sum, under way from its construction on.

    Worker i receives everybody's i-th part, adds them up in the order of the ranks and sends the sum to everybody, so
    all workers end with the same bits. They are not the bits of a ring's sum, which adds in another order.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup | None, workers: int) -> None:
        self._tensor = tensor
        self._group = group
        self._workers = workers
        self._part = -(-tensor.numel() // workers)
        self._sent = tensor.new_zeros(self._part * workers)
        self._sent[: tensor.numel()] = tensor
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait for the sum and put it in place of the tensor.

        Raises:
            RuntimeError: The collective failed.
        """
        self._work.wait()
        total = self._received.view(self._workers, self._part).sum(0)
        dist.all_to_all_single(self._sent, total.repeat(self._workers), group=self._group)
        return self._tensor.copy_(self._sent[: self._tensor.numel()])

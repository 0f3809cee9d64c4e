"""Sums a tensor over all workers in two hops, or one, where Gloo's all-reduce takes 2 (N - 1) around a ring.

A ring of several workers sends the fewest bytes at a time, which suits large tensors. With a small tensor, most of the
time is spent waking up at each hop; benchmarks/RESULTS.md has measurements on one machine.
"""

from collections.abc import Callable
from typing import Final, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.values import IntArray
from evenstep.launch.c10d import start_exchange, start_sum
from evenstep.torch.processes.workers import Workers

_LARGEST_PART_BYTES: Final = 64 * 1024
_LARGEST_WHOLE_BYTES: Final = 4 * 1024 * 1024
_WORD_BYTES: Final = 8


@final
class DirectSum:
    """Sums tensors of one axis, or raises a RuntimeError; a row of integers from each worker travels with the last hop.

    Of two workers, each sends all of its tensor to the other: as many bytes as Gloo's ring sends, in one hop instead of
    two. A sum of two has the same bits in any order. Of more workers, worker i receives the i-th part from all, adds
    the parts up and sends the sum to all. It cuts the tensor where Gloo's ring does, and adds in the same order (from
    worker i - 1 downwards), so the result equals that of `all_reduce` bit by bit. A test compares them, and would
    notice if Gloo changed its ring.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, count = workers, workers.count
        alone = count == 1 or workers.peers is not None  # Not all rows are in the groups of one peer of each worker.
        self.most_bytes = 0 if alone else _LARGEST_WHOLE_BYTES if count == 2 else _LARGEST_PART_BYTES * count
        """The size up to which a dense tensor on the CPU is likely to be summed faster than around a ring."""
        self.sum = self._sum_of_two if count == 2 else self._sum_of_parts
        """Replaces a tensor by the sum, and returns the rows of all workers, [workers, columns]."""
        self._fits: tuple[torch.dtype, int, int] | None = None
        self._of_two = count == 2 and not alone and len(set(workers.hosts)) == 1
        self._received = torch.empty(0)

    def sum_larger(self, tensor: torch.Tensor, meanwhile: Callable[[], None]) -> None:
        """Replace any tensor by the sum, and call `meanwhile` when it is on its way.

        Two workers on one host send it in one hop, too. Between hosts a ring adds up parts while others are on the way.
        """
        group = self._workers.device_group
        assert group is not None
        if not self._of_two or tensor.is_sparse or tensor.is_complex():
            work = start_sum(tensor, group)
            meanwhile()
            work.wait()
            return
        if self._received.dtype != tensor.dtype or self._received.numel() < tensor.numel():
            self._received = torch.empty_like(tensor)
        received, rank = self._received[: tensor.numel()], self._workers.rank
        work = start_exchange(received, tensor, group, (tensor.numel() * rank, tensor.numel() * (1 - rank)))
        meanwhile()
        work.wait()
        tensor.add_(received)

    def _sum_of_two(self, tensor: torch.Tensor, row: Callable[[], list[int]]) -> IntArray:
        own = row()
        if self._fits != (fits := (tensor.dtype, tensor.numel(), len(own))):
            words = -(-tensor.nbytes // _WORD_BYTES)
            length, rank = words + len(own), self._workers.rank
            # To send and to receive: a tensor like this one, then a row.
            self._messages = [torch.empty(length, dtype=torch.int64) for _ in range(2)]
            self._splits = length * rank, length * (1 - rank)
            self._tensors = [each[:words].view(tensor.dtype)[: tensor.numel()] for each in self._messages]
            self._rows = [each[words:].numpy() for each in self._messages]
            self._fits = fits
        (sent, received), group = self._messages, self._workers.device_group
        self._tensors[0].copy_(tensor)
        self._rows[0][:] = own
        assert group is not None
        start_exchange(received, sent, group, self._splits).wait()
        tensor.add_(self._tensors[1])
        return np.array(self._rows[::-1] if self._workers.rank else self._rows)

    def _sum_of_parts(self, tensor: torch.Tensor, row: Callable[[], list[int]]) -> IntArray:
        count, rank, group = self._workers.count, self._workers.rank, self._workers.device_group
        length = 2 * -(-tensor.numel() // (2 * count))  # The ring has two segments per worker.
        parts = tensor.new_zeros(length * count)
        parts[: tensor.numel()] = tensor
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=group, async_op=True)
        own, words = row(), -(-length * tensor.element_size() // _WORD_BYTES)
        sent = torch.zeros((count, words + len(own)), dtype=torch.int64)
        sent[:, words:] = torch.tensor(own)
        table = torch.empty_like(sent)
        summands, (mine, sums) = received.view(count, length), (each.view(tensor.dtype) for each in (sent, table))
        work.wait()
        total = summands[rank - 1]
        for step in range(2, count + 1):
            total = total.add_(summands[(rank - step) % count])
        mine[:, :length] = total
        dist.all_to_all_single(table, sent, group=group)
        tensor.copy_(sums[:, :length].reshape(-1)[: tensor.numel()])
        return table[:, words:].numpy()

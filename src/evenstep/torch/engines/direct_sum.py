"""Sums a small tensor over all workers in two hops, where Gloo's all-reduce takes 2 (N - 1) hops round a ring.

A ring sends the fewest bytes at a time, which is right for large tensors. With a small tensor, the time goes on
waking up at each hop; benchmarks/RESULTS.md has measurements on one machine.
"""

from typing import Final, final

import torch
import torch.distributed as dist

from evenstep.core.values import IntArray
from evenstep.torch.processes.workers import Workers

_LARGEST_PART_BYTES: Final = 64 * 1024
_WORD_BYTES: Final = 8


def suits(tensor: torch.Tensor, workers: Workers) -> bool:
    """Whether two hops are likely to be faster than a ring: CPU, dense, more than two workers, small parts."""
    if tensor.is_sparse or tensor.device.type != "cpu" or workers.count <= 2:
        return False
    return tensor.nbytes / workers.count <= _LARGEST_PART_BYTES


@final
class DirectSum:
    """A sum, under way from construction; a row of integers from each worker travels with its second hop.

    Worker i receives the i-th part from all workers, adds the parts up and sends the sum to all. It cuts the tensor
    where Gloo's ring does, and adds in the same order (from worker i - 1 downwards), so the result has the bits of
    `all_reduce`. A test compares them, and would notice if Gloo changed its ring.
    """

    def __init__(self, tensor: torch.Tensor, workers: Workers) -> None:
        self._tensor = tensor
        self._workers = workers
        # The ring has two segments per worker.
        self._part = 2 * -(-tensor.numel() // (2 * workers.count))
        self._sent = tensor.new_zeros(self._part * workers.count)
        self._sent[: tensor.numel()] = tensor
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=workers.device_group, async_op=True)

    def finish(self, row: list[int]) -> IntArray:
        """Wait for the sum, which replaces the tensor, and return the rows of all workers, [workers, columns].

        Raises:
            RuntimeError: The collective failed.
        """
        count, rank = self._workers.count, self._workers.rank
        self._work.wait()
        parts = self._received.view(count, self._part)
        total = parts[rank - 1]
        for step in range(2, count + 1):
            total = total.add_(parts[(rank - step) % count])
        words = -(-self._part * self._tensor.element_size() // _WORD_BYTES)
        sent = torch.zeros((count, words + len(row)), dtype=torch.int64)
        sent[:, words:] = torch.tensor(row)
        self._parts_of(sent, words)[:] = total
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._workers.device_group)
        self._tensor.copy_(self._parts_of(received, words).reshape(-1)[: self._tensor.numel()])
        return received[:, words:].numpy()

    def _parts_of(self, table: torch.Tensor, words: int) -> torch.Tensor:
        """The first `words` words of each row of an integer table, seen as parts of the tensor."""
        return table.view(self._tensor.dtype)[:, : words * _WORD_BYTES // self._tensor.element_size()][:, : self._part]

"""BatchNorm's running statistics over all workers, so that they are the same in every worker's checkpoint."""

from typing import final

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.torch.processes.workers import Workers


@final
class RunningStatistics:
    """Averages a model's running means and variances, weighted by samples.

    DistributedDataParallel gives all workers the statistics of worker 0, which are noise if worker 0 is slow and has a
    batch of two. The running mean here is the mean of the union batch. The running variance is the mean of the
    variances by which batches were normalised; like normalisation in training, it ignores how their means differ.

    All workers start and finish at the same places of an iteration.

    Attributes:
        norms: The modules whose statistics are averaged.
    """

    def __init__(self, model: torch.nn.Module, workers: Workers) -> None:
        self._workers = workers
        # SyncBatchNorm already has the statistics of the union batch.
        self.norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
        ]
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def start(self, weight: float, finite: torch.Tensor | None = None) -> None:
        """Send this worker's statistics. At weight 0, or if they are not `finite`, they do not count, even if NaN."""
        self.finish()
        buffers = self._buffers()
        if not buffers:
            return
        flat = torch.cat([*buffers, torch.ones_like(buffers[0][:1])]).double()
        flat = flat.mul_(weight) if weight else flat.zero_()
        if finite is not None:
            flat.masked_fill_(~finite, 0.0)
        work = dist.all_reduce(flat, group=self._workers.device_group, async_op=True)
        self._pending = (work, flat)

    def finish(self) -> None:
        """Take the averages if they are under way.

        Raises:
            RuntimeError: The collective failed.
        """
        if self._pending is None:
            return
        (work, flat), self._pending = self._pending, None
        work.wait()
        buffers = self._buffers()
        *averages, total = torch.split(flat, [*(len(buffer) for buffer in buffers), 1])
        torch._foreach_copy_(buffers, torch._foreach_div(averages, total[0]))

    def _buffers(self) -> list[torch.Tensor]:
        # Looked up each time: scripts reset and replace them.
        pairs = ((norm.running_mean, norm.running_var) for norm in self.norms)
        return [buffer for pair in pairs for buffer in pair if buffer is not None]

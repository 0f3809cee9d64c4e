"""BatchNorm's running statistics over all workers, so that any worker's checkpoint can be trusted."""

from typing import final

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.torch.processes.workers import Workers


@final
class RunningStatistics:
    """Averages a model's running means and variances, weighted by the samples that each worker's rest on.

    DistributedDataParallel gives everybody those of worker 0, which are noise where that is a slow worker with a batch
    of two. The running mean here is that of the union batch. The running variance is the mean of the variances that
    batches were normalised by; it leaves out how their means differ, as normalisation in training does.

    Every worker starts and finishes at the same places of an iteration; the sum is under way in between.
    """

    def __init__(self, model: torch.nn.Module, workers: Workers) -> None:
        self._workers = workers
        # SyncBatchNorm's are those of the union batch already.
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
        ]
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def start(self, weight: float) -> None:
        """Send this worker's; the weights of all sum to 1, and at 0 not even a NaN counts."""
        self.finish()
        buffers = self._buffers()
        if not buffers:
            return
        flat = torch.cat(buffers).double()
        flat = flat.mul_(weight) if weight else flat.zero_()
        work = dist.all_reduce(flat, group=self._workers.device_group, async_op=True)
        self._pending = (work, flat)

    def finish(self) -> None:
        """The averages become everybody's, where they are under way.

        Raises:
            RuntimeError: The collective failed.
        """
        if self._pending is None:
            return
        (work, flat), self._pending = self._pending, None
        work.wait()
        buffers = self._buffers()
        torch._foreach_copy_(buffers, torch.split(flat, [len(buffer) for buffer in buffers]))

    def _buffers(self) -> list[torch.Tensor]:
        # Looked up anew: scripts reset them, and put other tensors in their place.
        pairs = ((norm.running_mean, norm.running_var) for norm in self._norms)
        return [buffer for pair in pairs for buffer in pair if buffer is not None]

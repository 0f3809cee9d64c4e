"""Checkpoints of a whole run, from which it continues in mid-epoch on any number of workers.

    evenstep.checkpoint.restore("checkpoints", model, optimizer, loader)     # after prepare; None at the first start
    evenstep.checkpoint.save("checkpoints", model, optimizer, loader)        # after optimizer.step()

A checkpoint is written whole or not at all, and checked before it is used. `torch.distributed.checkpoint` writes the
tensors, so sharded models are written in parallel and can continue under another sharding.
"""

from torch.distributed.checkpoint.stateful import Stateful

from evenstep.checkpoint.restoring import restore
from evenstep.checkpoint.saving import save

__all__ = ["Stateful", "restore", "save"]

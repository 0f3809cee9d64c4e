"""A part of a scheme whose policy's every command is checked."""

from dataclasses import dataclass

from evenstep.core.sync import Sync, SyncPolicy
from evenstep.testing.watched import Watched


@dataclass(frozen=True)
class WatchedSync:
    part: Sync

    @property
    def in_step(self) -> bool:
        return self.part.in_step

    def policy(self, workers: int) -> SyncPolicy:
        return Watched(self.part.policy(workers))

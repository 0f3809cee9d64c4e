"""How far ahead may a worker run before it waits for the others? Decides what is committed when, and who may run."""

from evenstep.core.groups import Regroup
from evenstep.core.sync.barrier import Barrier
from evenstep.core.sync.base import Command, Commit, Push, Release, Sync, SyncPolicy
from evenstep.core.sync.bounded import Bounded, Unbounded
from evenstep.core.sync.dynamic import Dynamic
from evenstep.core.sync.grouped import Grouped

__all__ = [
    "Barrier",
    "Bounded",
    "Command",
    "Commit",
    "Dynamic",
    "Grouped",
    "Push",
    "Regroup",
    "Release",
    "Sync",
    "SyncPolicy",
    "Unbounded",
]

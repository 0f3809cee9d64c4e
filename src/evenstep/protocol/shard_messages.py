"""The commands of shard 0 to the other shards."""

from typing import Final, TypeAlias

import msgspec

from evenstep.core.coordinate import PushKey
from evenstep.protocol.encoding import Count, Incarnation, Record, Version
from evenstep.protocol.optimizer import Finite, Options

Floats: TypeAlias = tuple[Finite, ...]


class ShardAnswer(Record, frozen=True, kw_only=True):
    """Answer a worker's request.

    `ahead`, a number for each group, moves the weights ahead (`core.sync.rate`). `whole`: as in the coordinator's
    `Answer`.
    """

    worker: Count
    incarnation: Incarnation
    sequence: Count
    has: Version
    ahead: Floats
    whole: bool


class ShardCommit(Record, frozen=True, kw_only=True):
    """Commit these pushes with these weights. The other fields have an entry for each group (`rate.RatedStep`)."""

    pushes: tuple[tuple[PushKey, Finite], ...]
    options: tuple[Options, ...]
    factors: Floats
    compensation: Floats
    direct: Floats


class ShardLeave(Record, frozen=True, kw_only=True):
    """The worker has left. Only its `announced` pushes can still be committed."""

    worker: Count
    incarnation: Incarnation
    announced: tuple[PushKey, ...]


class ShardInitialise(Record, frozen=True, kw_only=True):
    """Start the run from the weights that this worker has staged."""

    worker: Count
    version: Count


class ShardRestore(Record, frozen=True, kw_only=True):
    """Go back to the snapshot of this version."""

    version: Count


class ShardSnapshot(Record, frozen=True, kw_only=True):
    """Write a snapshot. `meanwhile`: the run continues while it is written."""

    meanwhile: bool


Command: TypeAlias = ShardAnswer | ShardCommit | ShardLeave | ShardInitialise | ShardRestore | ShardSnapshot

COMMAND: Final = msgspec.msgpack.Decoder(Command)

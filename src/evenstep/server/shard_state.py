"""One shard of a run: its parameters, the pushes staged on it, and the workers' places. It decides nothing.

On shard 0 the primary calls it; on the others the same calls come over the connection to shard 0, in the same order.
"""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from evenstep.core.coordinate import PushKey
from evenstep.core.errors import ConfigError, DisagreementError, ProtocolError
from evenstep.protocol.optimizer import Options
from evenstep.protocol.run_spec import RunSpec
from evenstep.server.shard.shard import Shard
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard.updates import UpdateRule
from evenstep.server.worker_slot import WorkerSlot
from evenstep.tensors.messages import flat_views
from evenstep.transport.base import Connection, Header

if TYPE_CHECKING:
    import torch


@final
class ShardState:
    """What every shard does, one call at a time.

    Args:
        index: Which shard.
        count: How many the run has.
        snapshots: Where its part of a snapshot goes.
        allow: Optimizers beyond the table that a worker may name.

    Attributes:
        spec: The run; None before its first worker has told.
        seats: The workers that are here, by rank.
        version: Of the parameters; -1 before they have any.
        led: On the other shards: whether shard 0 still tells what to do.
    """

    def __init__(self, *, index: int, count: int, snapshots: Snapshots, allow: Sequence[str] = ()) -> None:
        self.index = index
        self.count = count
        self.spec: RunSpec | None = None
        self.slots: dict[int, WorkerSlot] = {}
        self.version = -1
        self.led = False
        self._snapshots = snapshots
        self._allow = tuple(allow)
        self._encoded = b""
        self._rules: tuple[UpdateRule, ...] = ()
        self._shard: Shard | None = None
        self._staged: dict[PushKey, list[torch.Tensor]] = {}

    # The run.

    def define(self, encoded: bytes, workers: int) -> RunSpec:
        """Take in what the run is, the first time; later, check that it is the same.

        Raises:
            ConfigError: It cannot be run.
            DisagreementError: It is another run than this one.
        """
        if self.spec is not None:
            if encoded != self._encoded:
                difference = RunSpec.decode(encoded, workers).difference(self.spec)
                raise DisagreementError(f"this worker's {difference}: start every worker with the same script")
            return self.spec
        spec = RunSpec.decode(encoded, workers)
        rules = tuple(UpdateRule(each, self._allow) for each in spec.optimizers)
        self._shard = Shard(spec.layout.shards(self.count)[self.index], rules)
        self._rules = rules
        self.spec, self._encoded = spec, encoded
        return spec

    @property
    def shard(self) -> Shard:
        """The parameters.

        Raises:
            ProtocolError: Nobody has said yet what they are.
        """
        if self._shard is None:
            raise ProtocolError("a worker asked for parameters before it said what the run is")
        return self._shard

    @property
    def nbytes(self) -> int:
        """The length of a message."""
        return self.shard.layout.nbytes

    def initialise(self, worker: int, version: int) -> None:
        """The parameters begin as the weights that this worker has put where its gradients go."""
        self.shard.initialise(self.slots[worker].gradients)
        self.version = version
        self._discard_all(worker, self.slots[worker].incarnation)

    def restore(self, version: int, workers: int) -> dict[str, object]:
        """Go back to a snapshot; what shard 0 wrote beside the parameters is returned."""
        state = self._snapshots.read(version, self.index)
        if self.spec is None:
            # Shard 0's word may come before the first worker: the run is the one that the snapshot is of.
            self.define(str(state["run"]).encode(), workers)
        if state["run"] != self._encoded.decode():
            raise ConfigError(
                "the snapshot is of another run: resume with the script, the scheme and the workers it was made with"
            )
        self.shard.load_state_dict(state["shard"])
        self.version = version
        return state

    def snapshot(self, told: Callable[[str | None], None], *, meanwhile: bool, **beside: object) -> None:
        """Write the parameters as they are now, and what stands beside them.

        Weights from which nobody could go on do not take the place of those before.

        Args:
            told: Called when all is on the disk, with None, or with the reason why it is not; maybe by another thread.
            meanwhile: The run goes on while a copy is written, of which there is never more than one: one before that
                is still being written is waited for. Else this returns when all is done, and takes no memory.
            beside: Plain values.
        """
        if not self.shard.finite():
            told("the weights hold a NaN or an infinity")
            return
        self._snapshots.wait()
        parameters = self.shard.state_dict()
        if meanwhile:
            parameters = copy.deepcopy(parameters)
        state = {"run": self._encoded.decode(), "shard": parameters, **beside}
        self._snapshots.write(self.version, self.index, state, told)
        if not meanwhile:
            self._snapshots.wait()

    # Workers.

    def slot(self, worker: int, incarnation: int, connection: Connection) -> WorkerSlot:
        """Give this incarnation of a worker its place."""
        slot = WorkerSlot(worker, incarnation, self.nbytes, connection)
        self.slots[worker] = slot
        return slot

    def leave(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        """The worker is gone. Of what it has staged only what it has announced may still be committed."""
        self._discard_all(worker, incarnation, announced)
        slot = self.slots.get(worker)
        if slot is not None and slot.incarnation == incarnation:
            del self.slots[worker]
            slot.close()

    # Pushes.

    def check_options(self, options: Sequence[Options]) -> None:
        """Whether these can be options that came with a push, one mapping per group of all optimizers.

        Raises:
            ConfigError: They are none of this run's optimizers.
        """
        begin = 0
        for rule in self._rules:
            end = begin + len(rule.spec.groups)
            rule.check(options[begin:end])
            begin = end
        if begin != len(options):
            raise ConfigError(f"options came for {len(options)} groups: send those of all {begin}")

    def stage(self, key: PushKey) -> None:
        """The worker's gradients are whole, in its place."""
        slot = self.slots[key[0]]
        if slot.flats is None:
            slot.flats = flat_views(self.shard.layout, slot.gradients)
        self._staged[key] = slot.flats

    def share(self, gradients: "torch.Tensor", connections: Sequence[Connection]) -> bool:
        """These gradients, a message or nothing, are in the places of all the workers that are reached over these.

        What these push next is one gradient, which is the mean of theirs. False, and nothing, if one has no place.
        """
        slots = {id(slot.connection): slot for slot in self.slots.values()}
        if any(id(each) not in slots for each in connections):
            return False
        flats = flat_views(self.shard.layout, gradients) if gradients.numel() else []
        for each in connections:
            slots[id(each)].gradients, slots[id(each)].flats = gradients, flats
        return True

    def discard(self, key: PushKey) -> None:
        """The push is empty, or will not be announced."""
        self._staged.pop(key, None)

    def _discard_all(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        for key in [key for key in self._staged if key[:2] == (worker, incarnation)]:
            if key not in announced:
                del self._staged[key]

    def squared_norm(self, pushes: Sequence[tuple[PushKey, float]]) -> float:
        """Of the sum of these pushes, with these weights."""
        return self.shard.squared_norm(self._gradients(pushes))

    def _gradients(self, pushes: Sequence[tuple[PushKey, float]]) -> list[tuple[list["torch.Tensor"], float]]:
        """What is staged of these pushes: what stands for several of them once, with the sum of their weights."""
        found: dict[int, tuple[list[torch.Tensor], float]] = {}
        for key, weight in pushes:
            flats = self._staged[key]
            _, before = found.get(id(flats), (flats, 0.0))
            found[id(flats)] = flats, before + weight
        return list(found.values())

    def commit(
        self,
        pushes: Sequence[tuple[PushKey, float]],
        options: Sequence[Options],
        factors: Sequence[float] = (),
        compensation: Sequence[float] = (),
    ) -> int:
        """Fold these staged pushes into the parameters, with these options, factors and compensation of each group.

        Those of several workers are a barrier's, who were all given the same weights.

        Returns:
            How many messages they had come in.
        """
        gradients = self._gradients(pushes)
        self.shard.commit(
            gradients,
            options,
            factors,
            stale=self._computed_on(pushes[0][0]) if any(compensation) else None,
            compensation=compensation,
        )
        for key, _ in pushes:
            del self._staged[key]
        self.version += 1
        return len(gradients)

    def _computed_on(self, key: PushKey) -> "torch.Tensor | None":
        """The weights that the worker was given last, or newer ones where exchanges overlap; None if they are not here.

        They are not where its place is new and it had them before.
        """
        slot = self.slots.get(key[0])
        return slot.weights if slot is not None and slot.incarnation == key[1] and slot.given else None

    def answer(self, worker: int, header: Header, ahead: Sequence[float] = ()) -> bool:
        """Answer the worker's request, with the weights where it has others; whether a message of them travels.

        With `ahead` they are moved on along the momentum, by one number for each group (`core.sync.rate.look_ahead`).
        """
        slot = self.slots.get(worker)
        if slot is None:
            return False
        weights = self.version >= 0 and (slot.version != self.version or slot.ahead != any(ahead))
        travel = weights and slot.give(self.version, ahead, lambda message: self.shard.read_weights(message, ahead))
        slot.answer({**header, "weights": weights}, weights=weights)
        return travel

"""One shard of a run: its parameters, staged pushes and worker slots. It decides nothing.

On shard 0 the primary calls it. On the other shards the same calls come from shard 0 as commands, in the same order.
"""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from evenstep.core.coordinate import PushKey
from evenstep.core.errors import ConfigError, DisagreementError, ProtocolError
from evenstep.core.samples.claims import Claim
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Answer, SendWeights, Work
from evenstep.protocol.optimizer import Options
from evenstep.protocol.run_spec import RunSpec
from evenstep.protocol.shard_messages import ShardCommit
from evenstep.server.shard.shard import Shard
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard.updates import UpdateRule
from evenstep.server.worker_slot import WorkerSlot
from evenstep.tensors.messages import flat_views
from evenstep.transport.base import Connection

if TYPE_CHECKING:
    import torch


@final
class ShardState:
    """What every shard does, one call at a time.

    Args:
        index: The number of this shard.
        count: Number of shards of the run.
        snapshots: Where its part of a snapshot is written.
        allow: Names of further optimizers that a worker may use.

    Attributes:
        spec: The run; None before the first worker has described it.
        slots: The workers that are here, by rank.
        version: The version of the parameters; -1 before they are initialised.
        led: On the other shards: whether the connection to shard 0 lives.
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
        """Learn the run from the first description, and check that later ones are the same.

        Raises:
            ConfigError: The servers cannot run this.
            DisagreementError: The description is of another run.
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
        """The parameters; ProtocolError before the first worker has described the run."""
        if self._shard is None:
            raise ProtocolError("a worker asked for parameters before it described the run")
        return self._shard

    @property
    def nbytes(self) -> int:
        """The length of a message in bytes."""
        return self.shard.layout.nbytes

    def initialise(self, worker: int, version: int) -> None:
        """Start from the weights that this worker has put into its buffer of gradients."""
        self.shard.initialise(self.slots[worker].gradients)
        self.version = version
        self._discard_all(worker, self.slots[worker].incarnation)

    def restore(self, version: int, workers: int) -> dict[str, object]:
        """Go back to a snapshot; returns its content, which includes shard 0's further values."""
        state = self._snapshots.read(version, self.index)
        if self.spec is None:
            # This command may arrive before the first worker: the snapshot describes the run.
            self.define(str(state["run"]).encode(), workers)
        if state["run"] != self._encoded.decode():
            raise ConfigError(
                "the snapshot is of another run: resume with the same script, scheme and number of workers"
            )
        self.shard.load_state_dict(state["shard"])
        self.version = version
        return state

    def snapshot(self, told: Callable[[str | None], None], *, meanwhile: bool, **beside: object) -> None:
        """Write the present parameters and further values. Weights that are not finite are not written.

        Args:
            told: Called once everything is on disk, with None, or with the reason of a failure; perhaps in another
                thread.
            meanwhile: Write a copy in the background, after any that is still being written. Otherwise this returns
                when everything is written, and needs no further memory.
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
        """Give this incarnation of a worker a slot."""
        slot = WorkerSlot(worker, incarnation, self.nbytes, connection)
        self.slots[worker] = slot
        return slot

    def leave(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        """The worker has left. Only its announced pushes may still be committed."""
        self._discard_all(worker, incarnation, announced)
        slot = self.slots.get(worker)
        if slot is not None and slot.incarnation == incarnation:
            del self.slots[worker]
            slot.close()

    # Pushes.

    def check_options(self, options: Sequence[Options]) -> None:
        """Check the options of a push, one mapping for each group of all optimizers.

        Raises:
            ConfigError: The optimizers of this run do not take these options.
        """
        begin = 0
        for rule in self._rules:
            end = begin + len(rule.spec.groups)
            rule.check(options[begin:end])
            begin = end
        if begin != len(options):
            raise ConfigError(f"options came for {len(options)} groups: send those of all {begin}")

    def stage(self, key: PushKey) -> None:
        """The worker's gradients are complete."""
        slot = self.slots[key[0]]
        if slot.flats is None:
            slot.flats = flat_views(self.shard.layout, slot.gradients)
        self._staged[key] = slot.flats

    def share(self, gradients: "torch.Tensor", connections: Sequence[Connection]) -> bool:
        """Set one gradient, the mean of several pushes, for all workers on these connections.

        Returns:
            False if one of the workers has no slot; nothing has changed then.
        """
        slots = {id(slot.connection): slot for slot in self.slots.values()}
        if any(id(each) not in slots for each in connections):
            return False
        flats = flat_views(self.shard.layout, gradients) if gradients.numel() else []
        for each in connections:
            slots[id(each)].gradients, slots[id(each)].flats = gradients, flats
        return True

    def discard(self, key: PushKey) -> None:
        """Forget a push that is empty or will not be announced."""
        self._staged.pop(key, None)

    def _discard_all(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        for key in [key for key in self._staged if key[:2] == (worker, incarnation)]:
            if key not in announced:
                del self._staged[key]

    def squared_norm(self, pushes: Sequence[tuple[PushKey, float]]) -> float:
        """The squared norm of the weighted sum of these pushes."""
        return self.shard.squared_norm(self._gradients(pushes))

    def _gradients(self, pushes: Sequence[tuple[PushKey, float]]) -> list[tuple[list["torch.Tensor"], float]]:
        """The staged gradients and weights. A gradient that stands for several pushes occurs once."""
        found: dict[int, tuple[list[torch.Tensor], float]] = {}
        for key, weight in pushes:
            flats = self._staged[key]
            _, before = found.get(id(flats), (flats, 0.0))
            found[id(flats)] = flats, before + weight
        return list(found.values())

    def commit(self, command: ShardCommit) -> int:
        """Apply staged pushes to the parameters.

        The pushes of several workers are those of a barrier, whose workers all had the same weights.

        Returns:
            The number of messages in which the pushes came.
        """
        gradients = self._gradients(command.pushes)
        stale = self._computed_on(command.pushes[0][0]) if any(command.compensation) else None
        self.shard.commit(
            gradients,
            command.options,
            command.factors,
            stale=stale,
            compensation=command.compensation,
            direct=command.direct,
        )
        for key, _ in command.pushes:
            del self._staged[key]
        self.version += 1
        return len(gradients)

    def _computed_on(self, key: PushKey) -> "torch.Tensor | None":
        """The weights that the worker had (or newer ones, if exchanges overlap); None if they are not here."""
        slot = self.slots.get(key[0])
        return slot.weights if slot is not None and slot.incarnation == key[1] and slot.given else None

    def give(self, worker: int, claims: Sequence[Claim]) -> None:
        """Answer the worker's request with these claims and without weights."""
        slot = self.slots.get(worker)
        if slot is not None:
            work = Work(claims=tuple((claim.number, claim.ranges) for claim in claims), over=False)
            slot.answer(
                encode(Answer(sequence=slot.sequence, weights=False, version=self.version, body=work)), weights=False
            )

    def answer(
        self, worker: int, sequence: int, body: SendWeights | Work | None = None, ahead: Sequence[float] = ()
    ) -> bool:
        """Answer the worker's request of this sequence, with the weights if the worker has others.

        `ahead`, one number for each group, moves them along the momentum (`core.sync.rate.look_ahead`).

        Returns:
            Whether a message of weights travels.
        """
        slot = self.slots.get(worker)
        if slot is None:
            return False
        weights = self.version >= 0 and (slot.version != self.version or slot.ahead != any(ahead))
        travel = weights and slot.give(self.version, ahead, lambda message: self.shard.read_weights(message, ahead))
        answer = Answer(sequence=sequence, weights=weights, version=self.version, body=body)
        slot.answer(encode(answer), weights=weights)
        return travel

"""One shard of a run: its parameters, staged pushes and worker slots. It decides nothing.

On shard 0 the primary calls it. On the other shards the same calls come from shard 0 as commands, in the same order.
"""

import copy
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from evenstep.core.coordinate import PushKey
from evenstep.core.errors import ConfigError, DisagreementError, ProtocolError
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol import shard_messages as commands
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Grant, NumberedReply, SendWeights
from evenstep.protocol.run_spec import RunSpec
from evenstep.server.server_slot import ServerSlot
from evenstep.server.shard.shard import MessageViews, Shard
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.narrow import NarrowMessages
from evenstep.transport.base import Connection

if TYPE_CHECKING:
    import torch


@final
class ShardState:
    """The work of every shard, one call at a time.

    Args:
        settings: The settings of this server; `index` is the number of this shard.

    Attributes:
        snapshots: Where its part of a snapshot is written.
        spec: The run; None before the first worker has described it.
        slots: The workers that are here, by rank.
        version: The version of the parameters; -1 before they are initialised.
        narrow: The format of messages on a narrow wire.
        commits, moved: How many commits there were, and how many messages of gradients and of weights; a narrow one is
            a part of one.
        led: On the other shards: whether the connection to shard 0 lives.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.snapshots = Snapshots(settings.snapshots, settings.count)
        self.spec: RunSpec | None = None
        self.slots: dict[int, ServerSlot] = {}
        self.version = -1
        self.narrow: NarrowMessages | None = None
        self.commits, self.moved = 0, 0.0
        self.led = False
        self._encoded = b""
        self._shard: Shard | None = None
        self._former: list[MessageViews] = []
        """Messages in which the weights have lain."""
        self._staged: dict[PushKey, MessageViews] = {}
        self._operations: Final[dict[type, Callable[[Any], object]]] = {
            commands.ShardAnswer: self.answer,
            commands.ShardCommit: self.commit,
            commands.ShardLeave: lambda command: self.leave(command.worker, command.incarnation, command.announced),
            commands.ShardInitialise: self._initialise,
            commands.ShardRestore: lambda command: self.restore(command.version),
        }

    def carry_out(self, command: commands.Command) -> None:
        """Carry out a command, except for a snapshot."""
        self._operations[type(command)](command)

    # The run.

    def define(self, encoded: bytes) -> RunSpec:
        """Learn the run from the first description, and check that later ones are the same.

        Raises:
            ConfigError: The servers cannot run this.
            DisagreementError: The description is of another run.
        """
        if self.spec is not None:
            if encoded != self._encoded:
                difference = RunSpec.decode(encoded, self.settings.workers).difference(self.spec)
                raise DisagreementError(f"this worker's {difference}: start every worker with the same script")
            return self.spec
        spec = RunSpec.decode(encoded, self.settings.workers)
        rules = tuple(UpdateRule(each, self.settings.allow) for each in spec.optimizers)
        self._shard = Shard(spec.layout.shards(self.settings.count)[self.settings.index], rules)
        wire = "float32" if spec.scheme.served is None else spec.scheme.served.wire
        self.narrow = None if wire == "float32" else NarrowMessages(self._shard.layout, wire)
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

    @property
    def _part(self) -> float:
        """The bytes of a narrow message for each byte of another."""
        return 1.0 if self.narrow is None else self.narrow.nbytes / self.nbytes

    def _initialise(self, command: commands.ShardInitialise) -> None:
        """Start from the weights that this worker has put into its buffer of gradients."""
        slot = self.slots[command.worker]
        self.shard.initialise(slot.gradients)
        self.version = command.version
        self._discard_all(slot.worker, slot.incarnation)

    def restore(self, version: int) -> dict[str, object]:
        """Go back to a snapshot; return its content, which includes shard 0's further values."""
        state = self.snapshots.read(version, self.settings.index)
        if self.spec is None:
            # This command may arrive before the first worker: the snapshot describes the run.
            self.define(str(state["run"]).encode())
        if state["run"] != self._encoded.decode():
            raise ConfigError(
                "the snapshot is of another run: resume with the same script, scheme and number of workers"
            )
        self.shard.load_state_dict(state["shard"])
        self.version = version
        return state

    def snapshot(self, told: Callable[[str | None], None], *, meanwhile: bool, **beside: object) -> None:
        """Write the current parameters and further values. Weights that are not finite are not written.

        Args:
            told: Called with None once everything is on disk, or with the reason of a failure; perhaps in another
                thread.
            meanwhile: Write a copy in the background, after any that is still being written. Otherwise this returns
                when everything is written, and needs no further memory.
            beside: Plain values.
        """
        if not self.shard.finite():
            told("the weights hold a NaN or an infinity")
            return
        self.snapshots.wait()
        parameters = self.shard.state_dict()
        if meanwhile:
            parameters = copy.deepcopy(parameters)
        state = {"run": self._encoded.decode(), "shard": parameters, **beside}
        self.snapshots.write(self.version, self.settings.index, state, told)
        if not meanwhile:
            self.snapshots.wait()

    # Workers.

    def slot(self, worker: int, incarnation: int, connection: Connection) -> ServerSlot:
        """Give this incarnation of a worker a slot."""
        slot = ServerSlot(worker, incarnation, self.nbytes, connection, self.narrow)
        self.slots[worker] = slot
        return slot

    def leave(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        """Free the slot of a worker that has left. Only its announced pushes may still be committed."""
        self._discard_all(worker, incarnation, announced)
        slot = self.slots.get(worker)
        if slot is not None and slot.incarnation == incarnation:
            del self.slots[worker]
            slot.close()
            self._former.clear()  # With fewer workers, weights lie in fewer messages.

    # Pushes.

    def stage(self, key: PushKey) -> None:
        """Stage the worker's gradients, which are complete."""
        slot = self.slots[key[0]]
        if slot.views is None:
            slot.views = MessageViews(self.shard.layout, slot.gradients)
        self._staged[key] = slot.views

    def share(self, gradients: "torch.Tensor", connections: Sequence[Connection]) -> bool:
        """Set one gradient, the mean of several pushes, for all workers on these connections.

        Returns:
            False if one of the workers has no slot; nothing has changed then.
        """
        slots = {id(slot.connection): slot for slot in self.slots.values()}
        if any(id(each) not in slots for each in connections):
            return False
        views = MessageViews(self.shard.layout, gradients) if gradients.numel() else None
        for each in connections:
            slots[id(each)].gradients, slots[id(each)].views = gradients, views
        return True

    def discard(self, key: PushKey) -> None:
        """Forget a push that was refused."""
        self._staged.pop(key, None)

    def _discard_all(self, worker: int, incarnation: int, announced: Sequence[PushKey] = ()) -> None:
        for key in [key for key in self._staged if key[:2] == (worker, incarnation)]:
            if key not in announced:
                del self._staged[key]

    def squared_norm(self, pushes: Sequence[tuple[PushKey, float]]) -> float:
        """Return the squared norm of the weighted sum of these pushes."""
        return self.shard.squared_norm(self._gradients(pushes))

    def _gradients(self, pushes: Sequence[tuple[PushKey, float]]) -> list[tuple[MessageViews, float]]:
        """Return the staged gradients and weights. A gradient that stands for several pushes occurs once."""
        found: dict[MessageViews, float] = {}
        for key, weight in pushes:
            views = self._staged[key]
            found[views] = found.get(views, 0.0) + weight
        return list(found.items())

    def commit(self, command: commands.ShardCommit) -> None:
        """Apply staged pushes to the parameters.

        Pushes of several workers come from a barrier, at which all workers had the same weights.
        """
        gradients = self._gradients(command.pushes)
        stale = self._computed_on(command.pushes[0][0]) if any(command.compensation) else None
        self._leave_sent(() if stale is not None else {key[:2] for key, _ in command.pushes})
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
        self.commits += 1
        self.moved += len(gradients) * self._part

    def _leave_sent(self, arrived: Container[tuple[int, int]]) -> None:
        """Move the weights if they are a worker's too. Its message may still be on its way, unless it has `arrived`."""
        own = {id(slot.weights) for slot in self.slots.values() if (slot.worker, slot.incarnation) not in arrived}
        if id(self.shard.weights) in own:
            free = next((each for each in self._former if id(each.message) not in own), None)
            self._former = [each for each in self._former if each is not free]
            self._former.append(self.shard.leave(free))

    def _computed_on(self, key: PushKey) -> "torch.Tensor | None":
        """Return the weights that the worker had (or newer ones, if exchanges overlap); None if they are not here."""
        slot = self.slots.get(key[0])
        return slot.weights if slot is not None and slot.incarnation == key[1] else None

    def give(self, worker: int, work: Grant | None = None) -> None:
        """Answer the worker's request without weights."""
        slot = self.slots.get(worker)
        if slot is not None:
            reply = NumberedReply(sequence=slot.sequence, weights=False, version=self.version, body=work)
            slot.answer(encode(reply), weights=False)

    def answer(self, command: commands.ShardAnswer, body: SendWeights | Grant | None = None) -> None:
        """Answer a request of a worker, with the weights if it has others. Shard 0 sends the body."""
        slot, ahead = self.slots.get(command.worker), command.ahead
        if slot is None or slot.incarnation != command.incarnation:
            return  # The worker has joined again, and another shard learned of it first.
        if command.sequence > slot.sequence:
            slot.take_in(command.sequence)  # A request without gradients is sent to shard 0 only.
        weights = self.version >= 0 and (command.whole or command.has != self.version)
        narrow = weights and not command.whole and self.narrow is not None
        if weights:
            which = (self.version, *ahead)
            moved = slot.give(
                which,
                lambda message: self.shard.read_weights(message, ahead),
                self.shard.weights if not any(ahead) else None,
                rounds=narrow,
            )
            self.moved += moved * (self._part if narrow else 1.0)
        reply = NumberedReply(
            sequence=command.sequence, weights=weights, version=self.version, narrow=narrow, body=body
        )
        slot.answer(encode(reply), weights=weights)

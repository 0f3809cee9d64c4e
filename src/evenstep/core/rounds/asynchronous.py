"""Federated training without rounds: when a node gets the model, and how much its change of the model counts."""

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.shown import shown
from evenstep.core.sync import Command, Commit, Grouped, Push, Release, Sync
from evenstep.core.sync.checked import sync_policy
from evenstep.core.sync.rate import RATES


class Counted(NamedTuple):
    """A node's change of the model, as part of an update.

    Attributes:
        node: The node that made the change.
        number: The number of the piece of work among this node's, from 0.
        factor: The multiplier of the change. The update is the mean of the products, weighted by examples.
        behind: Updates of the model since the node got it, in rounds' worth.
        stale: The number of these updates.
    """

    node: int
    number: int
    factor: float
    behind: float
    stale: int


class Step(NamedTuple):
    """The result of an event: updates of the model, in order, and then the nodes that get the newest model."""

    updates: tuple[tuple[Counted, ...], ...] = ()
    start: tuple[int, ...] = ()


@dataclass(slots=True)
class _Node:
    """A node that has joined.

    Attributes:
        running: Whether the node has the model and has not replied.
        part: The node's share of all examples when it got the model.
        begun, version: Progress and version of the model at that time.
    """

    rank: int
    examples: int = 0
    running: bool = False
    part: float = 0.0
    begun: float = 0.0
    version: int = 0


def staleness_factor(behind: float) -> float:
    """Weight of a change that misses `behind` rounds' worth of updates: max(1, behind)^(-1/2).

    Source: the power is FedBuff's (Nguyen et al., AISTATS 2022), which counts updates. Ours begins at one round,
    because nodes of equal speed without a barrier miss about one round's worth.
    """
    return float(max(1.0, behind) ** -0.5)


@final
class AsynchronousRounds:
    """Drives a sync policy over nodes that join and leave, each with a private dataset.

    A push is the change of the model that a node made in its local steps. With `share` an update of the pushes P is

        w <- w + S sum_i (n_i / sum_P n) d_i delta_i,     S = sum_P n_i / n,   d_i = max(1, behind_i)^(-1/2)

    with n_i the node's examples and n those of all present nodes. The update of a barrier has S = 1, as in FedAvg, and
    nodes of equal speed move the model in a round's time as far as a round of FedAvg. `raw` has FedBuff's factors at a
    server rate of 1: S = 1 and d_i = (1 + stale_i)^(-1/2). FedBuff weighs all pushes equally; here weights follow n_i.

    Training ends when replies cover `rounds` times the examples of all nodes, from whichever nodes. Work beyond that is
    not started, and lost work is repeated by whichever node is released next. Under a bounded `sync` all nodes do
    equally many pieces of work, up to the bound, so the objective is FedAvg's. Under `asp` a node counts in proportion
    to its speed.

    Args:
        sync: Bounds the lead of a node over the slowest one, and says which pushes form an update.
        nodes: The number of nodes at the start. With groups, further nodes wait for a place.
        rounds: The length of training, in rounds of all nodes.
        buffer: The least number of pushes of an update (FedBuff's K); the last update may have fewer.
        rate: `share` or `raw`.

    Raises:
        ConfigError: A value is out of range, or the nodes cannot be grouped.
    """

    def __init__(
        self, sync: Sync, nodes: int, rounds: int, *, buffer: int = 1, rate: Literal["share", "raw"] = "share"
    ) -> None:
        if type(buffer) is not int or buffer < 1:
            raise ConfigError(f"an update cannot have {shown(buffer)} replies: use a buffer of at least 1")
        if rate not in RATES:
            raise ConfigError(f"there is no rate {shown(rate)}: use one of {', '.join(RATES)}")
        self._policy = sync_policy(sync, nodes)
        self._expected, self._rounds = nodes, rounds
        self._buffer = buffer
        self._raw = rate == "raw"
        self._nodes: dict[int, _Node] = {}
        self._at: dict[int, int] = {}  # Node by rank.
        self._free = deque(range(nodes))
        self._fixed = isinstance(sync, Grouped)
        self._spare: deque[int] = deque()  # Nodes without a place.
        self._ready: deque[int] = deque()  # Released nodes; training may end before their work starts.
        self._iterations: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # Pieces of work started, by node; kept when a node leaves.
        self._lost: dict[int, int] = {}  # Pieces lost since the last that was not, by node; kept too.
        self._open: dict[tuple[int, int], tuple[Counted, float]] = {}  # By rank and iteration; no factor yet, the part.
        self._pending: list[Counted] = []  # Committed by the policy, not yet in an update.
        self._share = 0.0  # The share of the pending changes.
        self._known = self._examples = 0  # Nodes with a known number of examples, and the sum of these numbers.
        self._expects = 0.0  # The share of the nodes that have the model, and of replies that are not committed yet.
        self.spent = 0.0
        """Usable work that is committed, in rounds' worth. Read-only, like `progress` and `version`."""
        self.progress = 0.0
        """Work in the model, in rounds' worth."""
        self.version = 0
        """The number of updates of the model."""

    @property
    def done(self) -> bool:
        """True if all rounds' worth of work has ended and no node is running."""
        return self._enough and not any(member.running for member in self._nodes.values())

    @property
    def _enough(self) -> bool:
        return self.spent + self._expects >= self._rounds - 1e-9  # Rounding.

    @property
    def given_up(self) -> bool:
        """True if every present node has lost as many pieces of work in a row as there are rounds."""
        return bool(self._nodes) and all(self._lost.get(node, 0) >= self._rounds for node in self._nodes)

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes that have joined, including nodes that wait for a place in a group."""
        return frozenset(self._nodes) | frozenset(self._spare)

    def join(self, node: int, now: float) -> Step:
        """A node is available, for the first time or again."""
        if node in self.nodes:
            raise ProtocolError(f"node {node} joined twice: it must leave first")
        if not self._free:
            if self._fixed:
                self._spare.append(node)
                return Step()
            self._free.append(len(self._at) + len(self._free))
        rank = self._free.popleft()
        self._nodes[node] = _Node(rank)
        self._at[rank] = node
        return self._step(self._policy.on_join(rank, now))

    def reply(self, node: int, examples: int, now: float) -> Step:
        """A running node replied; its dataset has `examples` samples. 0: the reply cannot be used."""
        member = self._nodes.get(node)
        if member is None or not member.running:
            raise ProtocolError(f"node {node} replied without having the model")
        if examples:
            self._known += not member.examples
            self._examples += examples - member.examples
            member.examples = examples
        self._stopped(node, useful=examples > 0)
        iteration = self._iterations.get(member.rank, 0)
        self._iterations[member.rank] = iteration + 1
        if examples:
            behind = self.progress - member.begun
            stale = self.version - member.version
            self._open[member.rank, iteration] = (
                Counted(node, self._numbers[node] - 1, 1.0, behind, stale),
                member.part,
            )
        push = Push(member.rank, iteration, examples, examples, self._share_of(member), member.version)
        return self._step(self._policy.on_push(push, now))

    def leave(self, node: int, now: float) -> Step:
        """A node has vanished or failed. Its present work is lost; its earlier replies count."""
        if node in self._spare:
            self._spare.remove(node)
            return Step()
        member = self._nodes.get(node)
        if member is None:
            raise ProtocolError(f"node {node} left without having joined")
        if member.running:
            self._stopped(node, useful=False)
        if node in self._ready:
            self._ready.remove(node)
        commands = self._policy.on_leave(member.rank, now)
        del self._nodes[node], self._at[member.rank]
        self._free.append(member.rank)
        self._known -= bool(member.examples)
        self._examples -= member.examples
        step = self._step(commands)
        if not self._spare:
            return step
        more = self.join(self._spare.popleft(), now)
        return Step(step.updates + more.updates, step.start + more.start)

    def finish(self, now: float) -> Step:
        """The last updates, of replies that are in no update yet. Call nothing else after this."""
        commands = [each for member in self._nodes.values() for each in self._policy.on_leave(member.rank, now)]
        step = self._step([each for each in commands if isinstance(each, Commit)])
        return Step(step.updates + ((self._update(),) if self._pending else ()))

    def _step(self, commands: list[Command]) -> Step:
        updates = []
        for command in commands:
            if isinstance(command, Commit):
                counted, parts = zip(
                    *(self._open.pop((push.worker, push.iteration)) for push in command.pushes), strict=True
                )
                self._pending += counted
                self._share += command.share
                self._expects -= sum(parts)
                # A whole barrier counts as a round even if some of its replies are lost.
                self.spent += 1.0 if command.share == 1.0 else sum(parts)
                if len(self._pending) >= self._buffer:
                    updates.append(self._update())
            elif isinstance(command, Release):
                self._ready.append(self._at[command.worker])
        start = []
        while self._ready and not self._enough:  # The work of the other released nodes is no longer needed.
            node = self._ready.popleft()
            member = self._nodes[node]
            self._numbers[node] = self._numbers.get(node, 0) + 1
            member.running, member.begun, member.version = True, self.progress, self.version
            member.part = self._share_of(member)
            self._expects += member.part
            start.append(node)
        return Step(tuple(updates), tuple(start))

    def _update(self) -> tuple[Counted, ...]:
        whole = 1.0 if self._raw else self._share
        update = tuple(
            each._replace(factor=whole * ((1.0 + each.stale) ** -0.5 if self._raw else staleness_factor(each.behind)))
            for each in self._pending
        )
        self.progress += self._share
        self.version += 1
        self._pending, self._share = [], 0.0
        return update

    def _stopped(self, node: int, *, useful: bool) -> None:
        member = self._nodes[node]
        member.running = False
        self._expects -= 0.0 if useful else member.part
        self._lost[node] = 0 if useful else self._lost.get(node, 0) + 1

    def _share_of(self, member: _Node) -> float:
        """The node's share of all examples. A node with an unknown number counts as the mean of the others."""
        if not self._known:
            return 1.0 / max(len(self._nodes), self._expected)
        mean = self._examples / self._known
        whole = self._examples + (len(self._nodes) - self._known) * mean
        return (member.examples or mean) / whole

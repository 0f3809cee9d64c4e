"""What the servers do next: joins the policy of *how far ahead* with the samples, the sizes and the epochs.

Events in, commands out; whoever drives it (the server process, the simulator) carries the commands out in their order
before the next event. It knows workers by rank and nothing of processes, connections or tensors.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, cast, final

from evenstep.core.errors import DisagreementError, ProtocolError
from evenstep.core.load.base import Load
from evenstep.core.samples.claims import Claim, Claims
from evenstep.core.server.sizes import Sizes
from evenstep.core.sync.base import Command, Commit, Push, Release, Sync
from evenstep.core.values import Problem, State

PushKey: TypeAlias = tuple[int, int, int]
"""Names a push for ever: worker, incarnation, sequence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A worker's push, staged whole.

    `claim` is what it was computed on, on the weights of `version`; `row` is its row of `Reports`. `samples` is 0 where
    nothing of it is to be committed (a skipped step); the claim is then done with all the same.
    """

    key: PushKey
    claim: int
    version: int
    samples: int
    units: int
    row: tuple[int, ...]

    @property
    def worker(self) -> int:
        """Whose it is."""
        return self.key[0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Fold these staged pushes into the parameters, as one commit.

    `pushes` has what each counts, summing to 1. `share` is the part of a global batch that the commit stands for;
    `staleness` is the most versions that any of the pushes had missed, and `behind` the same in global batches.
    `version` is the parameters' version afterwards.
    """

    pushes: tuple[tuple[PushKey, float], ...]
    share: float
    staleness: int
    behind: float
    version: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Forget this staged push: it was empty."""

    key: PushKey


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer this worker, with the weights as they are now.

    `claims` are what to compute on next, one after another, beside what it holds. None: nothing is left for it, and
    `over` says whether the pass has ended, or whether it may ask again, with empty hands, and wait. `release` tells how
    long it was held, where it was.
    """

    worker: int
    claims: tuple[Claim, ...]
    over: bool
    version: int
    release: Release | None = None


CoordinatorCommand: TypeAlias = Update | Discard | Answer


@dataclass(slots=True)
class _Worker:
    """One that is here.

    running: the sync policy has it, computing or held. ahead: how many claims it wants beside the one in hand.
    claims: what it holds, the first one in hand. answered: versions and samples committed when it was answered, the
    latest last; it computes on no others.
    """

    running: bool = False
    ahead: int = 0
    claims: list[int] = field(default_factory=list)
    iteration: int = 0
    answered: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A push that has arrived and is not committed: whose weights it was computed on."""

    arrival: Arrival
    samples: int


@final
class Coordinator:
    """Decides for a run on servers, one event after another.

    A *pass* is one loop over the prepared loader, counted from 0; its `epoch` is the number that the script gave it,
    on which the order of its samples depends. All workers share the samples of a pass, and it ends for all together.

    Args:
        sync: How far ahead workers may run.
        load: How much each computes.
        problem: What the sizes must satisfy, by rank.
        length: Positions in an epoch.
        drop_last: Leave out what does not fill a last global batch.

    Attributes:
        version: Commits so far.
        samples: Samples committed so far.
        number, epoch: The pass under way, or the last one, and its epoch; -1 before the first.
    """

    def __init__(self, *, sync: Sync, load: Load, problem: Problem, length: int, drop_last: bool = False) -> None:
        self.version = 0
        self.samples = 0
        self.number = -1
        self.epoch = -1
        self.sizes = Sizes(load, problem)
        self.sync = sync.policy()
        self._in_step = sync.in_step
        self._whole = problem.global_batch_size
        self._length = length - length % self._whole if drop_last else length
        self._workers: dict[int, _Worker] = {}
        # Kept beside the workers so that no event looks through all of them.
        self._resting: set[int] = set()
        self._inside: set[int] = set()
        """Those who have begun the pass and do not know yet that it is over."""
        self._begins: dict[int, tuple[int, int]] = {}
        self._claims = Claims(0)
        self._slice: dict[int, int] = {}
        self._iterations: dict[int, int] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}

    @property
    def finished(self) -> int:
        """How many samples of the pass are committed."""
        return self._claims.finished

    @property
    def over(self) -> bool:
        """Whether the pass under way has ended; true before the first."""
        return self._claims.over

    # Workers come and go.

    def join(self, worker: int) -> None:
        """A worker is here; it computes nothing before it begins a pass.

        Raises:
            ProtocolError: It is here already.
        """
        if worker in self._workers:
            raise ProtocolError(f"worker {worker} joined although it is here")
        self._workers[worker] = _Worker(iteration=self._iterations.get(worker, 0))
        self.sizes.set_members(tuple(sorted(self._workers)))

    def leave(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker is gone, dead or done: its open claims go back, and nobody waits for it."""
        commands = self._stop(worker, now)
        self._iterations[worker] = self._workers.pop(worker).iteration
        self.sizes.set_members(tuple(sorted(self._workers)))
        return [*commands, *self._go_on(now)]

    # A pass.

    def begin(self, worker: int, number: int, epoch: int, now: float, *, ahead: int = 0) -> list[CoordinatorCommand]:
        """A worker begins the pass of that number, or waits until it can; one that is over is answered as such.

        With `ahead` it is given so many claims more than it computes on, to go on with while it is held, except where
        all go in step.

        Raises:
            DisagreementError: The others run that pass as another epoch.
        """
        state = self._known(worker)
        begun = {self.number: self.epoch, **dict(self._begins.values())}
        if begun.get(number, epoch) != epoch:
            raise DisagreementError(
                f"worker {worker} runs its loop {number} as epoch {epoch} where the others run epoch {begun[number]}:"
                " call set_epoch alike on all workers"
            )
        commands = self._stop(worker, now)
        # A slice is shared out whole before the next one is, so whoever goes in step holds no more than one claim.
        state.ahead = 0 if self._in_step else ahead
        self._begins[worker] = (number, epoch)
        return [*commands, *self._go_on(now)]

    def push(self, arrival: Arrival, now: float) -> list[CoordinatorCommand]:
        """A running worker's gradients are staged on every shard.

        Raises:
            ProtocolError: The worker does not run, or on another claim.
        """
        worker = arrival.worker
        state = self._known(worker)
        if not state.running or state.claims[:1] != [arrival.claim]:
            raise ProtocolError(f"worker {worker} pushed the claim {arrival.claim}, but holds {state.claims}")
        seen = dict(state.answered)
        if arrival.version not in seen:
            raise ProtocolError(f"worker {worker} pushed on version {arrival.version}, but was given {sorted(seen)}")
        state.claims.pop(0)
        state.iteration += 1
        self.sizes.observe(worker, list(arrival.row))
        commands: list[CoordinatorCommand] = []
        if arrival.samples:
            self._pending[worker, state.iteration] = _Pending(arrival, seen[arrival.version])
        else:
            commands.append(Discard(key=arrival.key))
            self._claims.finish(worker, arrival.claim)
        push = Push(
            worker=worker,
            iteration=state.iteration,
            samples=arrival.samples,
            units=arrival.units,
            share=arrival.samples / self._whole,
            version=arrival.version,
        )
        commands += self._carried_out(self.sync.on_push(push, now), now)
        return [*commands, *self._go_on(now)]

    def rest(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker for which nothing was left asks for more, and waits for it or for the end of the pass.

        Raises:
            ProtocolError: The worker is not known, or computes.
        """
        state = self._known(worker)
        if state.running:
            raise ProtocolError(f"worker {worker} asked for more samples while it holds the claims {state.claims}")
        self._resting.add(worker)
        return self._go_on(now)

    def stop(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker has left its loop before the end: what it claimed and did not push goes back."""
        return [*self._stop(worker, now), *self._go_on(now)]

    # In between.

    def _known(self, worker: int) -> _Worker:
        if worker not in self._workers:
            raise ProtocolError(f"worker {worker} has not joined, or was given up for dead")
        return self._workers[worker]

    def _stop(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """Take the worker out of the pass; a push of its that has arrived is still committed."""
        state = self._known(worker)
        state.claims = []
        self._resting.discard(worker)
        self._inside.discard(worker)
        self._begins.pop(worker, None)
        self._slice.pop(worker, None)
        arrived = (each.arrival for each in self._pending.values())
        self._claims.give_back(worker, keep=frozenset(each.claim for each in arrived if each.worker == worker))
        if not state.running:
            return []
        state.running = False
        return self._carried_out(self.sync.on_leave(worker, now), now)

    def _go_on(self, now: float) -> list[CoordinatorCommand]:
        """Answer everyone who waits and need not any more."""
        if self._begins:
            self._open()
            for worker, (number, _) in list(self._begins.items()):
                if number <= self.number:
                    del self._begins[worker]
                    self._resting.add(worker)
                    self._inside.add(worker)
        if not self._resting:
            return []
        if self._claims.unclaimed:
            resting = sorted(self._resting)
            self._resting.clear()
            for worker in resting:
                self._workers[worker].running = True
            return self._carried_out([each for w in resting for each in self.sync.on_join(w, now)], now)
        if not self._claims.over:
            return []
        resting = sorted(self._resting)
        self._resting.clear()
        return [self._answer(worker, ()) for worker in resting]

    def _open(self) -> None:
        """Begin a new pass, where nobody is in the present one and, if all go in step, all have come."""
        number, epoch = min(self._begins.values())
        if number <= self.number or self._inside:
            return
        if self._in_step and len(self._begins) < len(self._workers):
            return
        self.number, self.epoch = number, epoch
        self._claims = Claims(self._length)
        self._slice = {}
        self.sizes.begin_epoch(epoch)

    def _carried_out(self, decided: Iterable[Command], now: float) -> list[CoordinatorCommand]:
        """What the sync policy has decided, with the samples and the sizes put in."""
        commands: list[CoordinatorCommand] = []
        queue = deque(decided)
        while queue:
            command = queue.popleft()
            if isinstance(command, Commit):
                commands.append(self._update(command))
                continue
            state = self._workers[command.worker]
            claims = self._take(command.worker, 1 + state.ahead - len(state.claims))
            if not state.claims:
                # Whoever has nothing to compute holds nobody.
                state.running = False
                queue.extend(self.sync.on_leave(command.worker, now))
            commands.append(self._answer(command.worker, claims, command))
        return commands

    def _update(self, commit: Commit) -> Update:
        pending = [self._pending.pop((push.worker, push.iteration)) for push in commit.pushes]
        units = [push.units for push in commit.pushes]
        total = sum(units)
        update = Update(
            pushes=tuple(
                (each.arrival.key, count / total if total else 1 / len(units))
                for each, count in zip(pending, units, strict=True)
            ),
            share=commit.share,
            staleness=max(self.version - each.arrival.version for each in pending),
            behind=max(self.samples - each.samples for each in pending) / self._whole,
            version=self.version + 1,
        )
        for each in pending:
            self._claims.finish(each.arrival.worker, each.arrival.claim)
            self.samples += each.arrival.samples
        self.version += 1
        return update

    def _take(self, worker: int, count: int) -> tuple[Claim, ...]:
        """Up to so many claims for this worker, as far as anything is left."""
        claims: list[Claim] = []
        while len(claims) < count:
            size = self._size(worker)
            claim = self._claims.take(worker, size) if size else None
            if claim is None:
                break
            claims.append(claim)
        self._workers[worker].claims += [claim.number for claim in claims]
        return tuple(claims)

    def _size(self, worker: int) -> int:
        unclaimed = self._claims.unclaimed
        if not self._in_step:
            return self.sizes.next_of(worker, unclaimed)
        if worker not in self._slice:
            running = tuple(sorted(each for each, state in self._workers.items() if state.running))
            self._slice = self.sizes.slice_of(running, unclaimed)
        return self._slice.pop(worker)

    def _answer(self, worker: int, claims: tuple[Claim, ...], release: Release | None = None) -> Answer:
        state = self._workers[worker]
        state.answered = [*state.answered[-1 - state.ahead :], (self.version, self.samples)]
        over = not state.claims and self._claims.over
        if over:
            self._inside.discard(worker)
        return Answer(
            worker=worker,
            claims=claims,
            over=over,
            version=self.version,
            release=release,
        )

    # A checkpoint.

    def state_dict(self) -> State:
        """What a coordinator of the same scheme needs to go on, once its workers have joined anew."""
        return {
            "version": self.version,
            "samples": self.samples,
            "pass": self.number,
            "epoch": self.epoch,
            "claims": self._claims.state_dict(),
            "sizes": self.sizes.state_dict(),
            "sync": self.sync.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken, before any worker joins; what was not committed is done again."""
        self.version = cast("int", state["version"])
        self.samples = cast("int", state["samples"])
        self.number = cast("int", state["pass"])
        self.epoch = cast("int", state["epoch"])
        self._claims.load_state_dict(cast("State", state["claims"]))
        self.sizes.load_state_dict(cast("State", state["sizes"]))
        self.sync.load_state_dict(cast("State", state["sync"]))

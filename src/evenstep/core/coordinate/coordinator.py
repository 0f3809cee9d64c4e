"""What the servers do next: joins the policy of *how far ahead* with the samples, the sizes and the epochs.

Events in, commands out; whoever drives it (the server process, the simulator) carries the commands out in their order
before the next event. It knows workers by rank and nothing of processes, connections or tensors. No event looks at all
workers, but for those that concern them all: a pass that begins or ends, a whole barrier, groups that are formed anew.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast, final

from evenstep.core.coordinate.commands import Answer, Arrival, CoordinatorCommand, Discard, PushKey, Update
from evenstep.core.coordinate.group_sizes import GroupSizes
from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.errors import DisagreementError, ProtocolError
from evenstep.core.load.base import Load
from evenstep.core.load.limits import SizeLimits
from evenstep.core.samples.claims import Claim, Claims
from evenstep.core.sync.base import Command, Commit, Push, Regroup, Release, Sync
from evenstep.core.values import Problem, State


@dataclass(slots=True)
class _Worker:
    """One that is here.

    begun: the pass that it is in or waits for; None once it knows that it is over, or has left its loop.
    active: the sync policy has it, computing or held. waits: it asked for something and has not been answered.
    ahead: how many claims it wants beside the one in hand.
    claims: what it holds, the first one in hand. fresh: those of them that its next answer tells it of.
    answered: versions and samples committed when it was answered, as many of the latest as it may hold claims; it
    computes on no others.
    """

    iteration: int
    begun: int | None = None
    active: bool = False
    waits: bool = False
    ahead: int = 0
    claims: list[int] = field(default_factory=list)
    fresh: list[Claim] = field(default_factory=list)
    answered: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=1))


@dataclass(slots=True)
class _Gathering:
    """Those who wait for a pass to begin."""

    epoch: int
    workers: set[int] = field(default_factory=set)


@final
class Coordinator:
    """Decides for a run on servers, one event after another.

    A *pass* is one loop over the prepared loader, counted from 0; its `epoch` is the number that the script gave it,
    on which the order of its samples depends. All workers share the samples of a pass, and it ends for all together.
    A worker that has begun the pass is *active* where the sync policy has it, *resting* where it waits for samples
    that others may give back, or about to rest.

    Where all go in step, nothing begins before each worker of the problem has begun or has left: the samples of an
    iteration are one slice of the epoch, which all share.

    Args:
        sync: How far ahead workers may run.
        load: How much each computes.
        problem: What the sizes must satisfy, by rank; everybody's minimum is at least 1.
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
        self._limits = SizeLimits(load, problem)
        self.sizes: Sizes | GroupSizes = Sizes(load, problem, self._limits)
        self._load = load
        self._problem = problem
        self._saved_sizes: State | None = None
        """Of groups that have not been told yet."""
        self.sync = sync.policy(problem.workers)
        self._in_step = sync.in_step
        self._whole = problem.global_batch_size
        self._length = length - length % self._whole if drop_last else length
        self._claims = Claims(0)
        self._workers: dict[int, _Worker] = {}
        self._iterations: dict[int, int] = {}
        """Of those who have left."""
        self._pending: dict[tuple[int, int], tuple[Arrival, int]] = {}
        """By worker and iteration, the pushes to be committed, each with the samples that its weights had seen."""
        # Where the workers are, kept beside them so that no event looks through all of them.
        self._awaited = set(range(problem.workers))
        self._gatherings: dict[int, _Gathering] = {}
        self._inside = 0
        self._resting: OrderedDict[int, None] = OrderedDict()

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
        self._workers[worker] = _Worker(iteration=self._iterations.pop(worker, 0))
        self.sizes.join(worker)

    def awaits(self, worker: int) -> bool:
        """Whether this worker of the problem has neither come nor been given up."""
        return worker in self._awaited and worker not in self._workers

    def leave(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker is gone, dead or done, or never came: its open claims go back, and nobody waits for it.

        Raises:
            ProtocolError: It has not joined, and nobody waits for it.
        """
        if self.awaits(worker):
            self._awaited.discard(worker)
            return self._go_on(now)
        self._known(worker)
        self._awaited.discard(worker)
        active = self._take_out(worker)
        self._iterations[worker] = self._workers.pop(worker).iteration
        self.sizes.leave(worker)
        commands = self._carried_out(self.sync.on_leave(worker, now), now) if active else []
        return [*commands, *self._go_on(now)]

    # A pass.

    def begin(self, worker: int, number: int, epoch: int, now: float, *, ahead: int = 0) -> list[CoordinatorCommand]:
        """A worker begins the pass of that number, or waits until it can; one that is over is answered as such.

        With `ahead` it is given so many claims more than it computes on, to go on with while it is held.

        Raises:
            ProtocolError: The worker is not known.
            DisagreementError: The others run that pass as another epoch.
        """
        state = self._known(worker)
        self._check_epoch(worker, number, epoch)
        commands = self._stopped(worker, now)
        self._awaited.discard(worker)
        state.ahead = ahead
        state.answered = deque(state.answered, maxlen=1 + ahead)
        if number < self.number:
            commands.append(self._answer(worker, state, True))
            return [*commands, *self._go_on(now)]
        state.begun = number
        state.waits = True
        if number == self.number:
            self._inside += 1
            self._resting[worker] = None
        else:
            self._gatherings.setdefault(number, _Gathering(epoch)).workers.add(worker)
        return [*commands, *self._go_on(now)]

    def push(self, arrival: Arrival, now: float) -> list[CoordinatorCommand]:
        """An active worker's gradients are staged on every shard.

        Raises:
            ProtocolError: The worker does not run, or on another claim, or on weights that it was not given last.
        """
        key, claim, version, samples = arrival.key, arrival.claim, arrival.version, arrival.samples
        worker = key[0]
        state = self._known(worker)
        claims = state.claims
        if not claims or claims[0] != claim:
            raise ProtocolError(f"worker {worker} pushed the claim {claim}, but holds {claims}")
        for answered, committed in state.answered:
            if answered == version:
                samples_before = committed
                break
        else:
            given = sorted({answered for answered, _ in state.answered})
            raise ProtocolError(f"worker {worker} pushed on version {version}, but was given {given}")
        iteration = state.iteration + 1
        push = Push(worker, iteration, samples, arrival.units, samples / self._whole, version)
        # First of all, since it refuses a push by a worker that it holds.
        decided = self.sync.on_push(push, now)
        state.iteration = iteration
        state.waits = True
        del claims[0]
        self.sizes.observe(worker, arrival.row)
        if samples:
            self._pending[worker, iteration] = arrival, samples_before
            commands = self._carried_out(decided, now)
        else:
            self._claims.finish(worker, claim)
            commands = [Discard(key), *self._carried_out(decided, now)]
        if self._resting or not self._inside:
            commands += self._go_on(now)
        return commands

    def rest(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker for which nothing was left asks for more, and waits for it or for the end of the pass.

        Raises:
            ProtocolError: The worker is not known, or is not in the pass, or runs.
        """
        state = self._known(worker)
        if state.begun is None or state.begun != self.number:
            raise ProtocolError(f"worker {worker} asked for more samples, but is not in the pass {self.number}")
        if state.active:
            raise ProtocolError(f"worker {worker} asked for more samples while it runs, with the claims {state.claims}")
        state.waits = True
        self._resting[worker] = None
        return self._go_on(now)

    def stop(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker has left its loop before the end: what it claimed and did not push goes back.

        Raises:
            ProtocolError: The worker is not known.
        """
        self._known(worker)
        return [*self._stopped(worker, now), *self._go_on(now)]

    def in_loop(self, worker: int) -> bool:
        """Whether the worker is in a pass, or waits for one to begin."""
        state = self._workers.get(worker)
        return state is not None and state.begun is not None

    def waited_for(self) -> list[int]:
        """The workers that another one waits for, ascending; none of them waits itself. Looks at all workers."""
        waited = set(self.sync.waited_for())
        if self._resting:
            waited.update(worker for worker, state in self._workers.items() if state.claims)
        if self._gatherings and self._inside:
            waited.update(worker for worker, state in self._workers.items() if state.begun == self.number)
        elif self._gatherings and self._in_step:
            waited.update(worker for worker, state in self._workers.items() if state.begun is None)
        if not self._may_run and (self._resting or self._gatherings):
            waited |= self._awaited & self._workers.keys()
        return sorted(worker for worker in waited if not self._workers[worker].waits)

    # In between.

    def _known(self, worker: int) -> _Worker:
        if worker not in self._workers:
            raise ProtocolError(f"worker {worker} has not joined, or was given up for dead")
        return self._workers[worker]

    def _check_epoch(self, worker: int, number: int, epoch: int) -> None:
        gathering = self._gatherings.get(number)
        theirs = self.epoch if number == self.number else gathering.epoch if gathering is not None else epoch
        if theirs != epoch:
            raise DisagreementError(
                f"worker {worker} runs its loop {number} as epoch {epoch} where the others run epoch {theirs}:"
                " call set_epoch alike on all workers"
            )

    def _stopped(self, worker: int, now: float) -> list[CoordinatorCommand]:
        return self._carried_out(self.sync.on_leave(worker, now), now) if self._take_out(worker) else []

    def _take_out(self, worker: int) -> bool:
        """Take the worker out of its pass, but for a push that has arrived; whether the sync policy still has it."""
        state = self._workers[worker]
        if state.begun == self.number:
            self._inside -= 1
        elif state.begun is not None:
            gathering = self._gatherings[state.begun]
            gathering.workers.discard(worker)
            if not gathering.workers:
                del self._gatherings[state.begun]
        state.begun = None
        state.waits = False
        self._resting.pop(worker, None)
        self._claims.give_back(worker, state.claims)
        state.claims = []
        active, state.active = state.active, False
        return active

    def _go_on(self, now: float) -> list[CoordinatorCommand]:
        """Answer everyone who waits and need not any more."""
        commands = self._serve_resting(now) if self._resting else []
        while not self._inside and self._open():
            commands += self._serve_resting(now)
        return commands

    @property
    def _may_run(self) -> bool:
        return not (self._in_step and self._awaited)

    def _serve_resting(self, now: float) -> list[CoordinatorCommand]:
        """Those who rest run where there is something for them, and leave the pass where it is over."""
        commands: list[CoordinatorCommand] = []
        while self._resting and self._claims.unclaimed and self._may_run:
            # No more of them than there is work for, except that a slice is for all.
            waking = sorted(self._resting) if self._in_step else [next(iter(self._resting))]
            decided: list[Command] = []
            for worker in waking:
                del self._resting[worker]
                self._workers[worker].active = True
                decided += self.sync.on_join(worker, now)
            commands += self._carried_out(decided, now)
        if self._claims.over:
            commands += [self._answer(worker, self._workers[worker], True) for worker in sorted(self._resting)]
            self._resting.clear()
        return commands

    def _open(self) -> bool:
        """Begin the next pass, as nobody is in the present one, if somebody waits and, in step, all have come."""
        if not self._gatherings or not self._may_run:
            return False
        waiting = sum(len(gathering.workers) for gathering in self._gatherings.values())
        if self._in_step and waiting < len(self._workers):
            return False
        self.number = min(self._gatherings)
        gathering = self._gatherings.pop(self.number)
        self.epoch = gathering.epoch
        self._inside = len(gathering.workers)
        self._resting.update(dict.fromkeys(sorted(gathering.workers)))
        self._claims = Claims(self._length)
        self.sizes.begin_epoch(self.epoch)
        return True

    def _carried_out(self, decided: Sequence[Command], now: float) -> list[CoordinatorCommand]:
        """What the sync policy has decided, with the samples and the sizes put in."""
        commands: list[CoordinatorCommand] = []
        while decided:
            if self._in_step:
                commands += self._regrouped(decided)
            self._hand_out([each.worker for each in decided if type(each) is Release])
            further: list[Command] = []
            for command in decided:
                if type(command) is Commit:
                    commands.append(self._update(command))
                elif type(command) is Release:
                    worker = command.worker
                    state = self._workers[worker]
                    over = False
                    if not state.claims:
                        # Whoever has nothing to compute holds nobody.
                        state.active = False
                        further += self.sync.on_leave(worker, now)
                        over = self._claims.over
                    commands.append(self._answer(worker, state, over, command))
            decided = further
        return commands

    def _regrouped(self, decided: Sequence[Command]) -> list[CoordinatorCommand]:
        """Where groups have been formed: their sizes are shared out among them, and whoever drives is told."""
        formed = [command for command in decided if isinstance(command, Regroup)]
        for command in formed:
            members = self.sizes.members
            sizes = GroupSizes(self._load, self._problem, command.groups, members, self.epoch, self._limits)
            saved, self._saved_sizes = self._saved_sizes, None
            if saved is not None and saved["groups"] == [list(group) for group in command.groups]:
                sizes.load_state_dict(saved)
                sizes.begin_epoch(self.epoch)
            self.sizes = sizes
        return [*formed]

    def _update(self, commit: Commit) -> Update:
        version, before, share = self.version, self.samples, commit.share
        self.version = version + 1
        if len(commit.pushes) == 1:  # As most are; the rest is the same for many.
            key, oldest, fewest = self._finish(commit.pushes[0])
            return Update(((key, 1.0),), share, version - oldest, (before - fewest) / self._whole, version + 1)
        units = sum([push.units for push in commit.pushes])
        pushes: list[tuple[PushKey, float]] = []
        oldest, fewest = version, before
        for push in commit.pushes:
            key, computed_on, samples_before = self._finish(push)
            pushes.append((key, push.units / units if units else 1 / len(commit.pushes)))
            oldest, fewest = min(oldest, computed_on), min(fewest, samples_before)
        return Update(tuple(pushes), share, version - oldest, (before - fewest) / self._whole, version + 1)

    def _finish(self, push: Push) -> tuple[PushKey, int, int]:
        """Count this push as committed; its name, and versions and samples committed when it was answered before."""
        worker = push.worker
        arrival, samples_before = self._pending.pop((worker, push.iteration))
        self._claims.finish(worker, arrival.claim)
        self.samples += arrival.samples
        return arrival.key, arrival.version, samples_before

    def _hand_out(self, wanting: Sequence[int]) -> None:
        """Give each of these as many claims as it wants, as far as anything is left: one round after another.

        In step, a round is a slice that they share.
        """
        claims, sizes = self._claims, self.sizes
        while wanting and claims.unclaimed:
            planned = sizes.slice_of(tuple(wanting), claims.unclaimed) if self._in_step else None
            still_wanting = []
            for worker in wanting:
                size = sizes.next_of(worker, claims.unclaimed) if planned is None else planned[worker]
                claim = claims.take(worker, size)
                state = self._workers[worker]
                if claim is not None:
                    state.claims.append(claim.number)
                    state.fresh.append(claim)
                if len(state.claims) <= state.ahead:
                    still_wanting.append(worker)
            wanting = still_wanting

    def _answer(self, worker: int, state: _Worker, over: bool, release: Release | None = None) -> Answer:
        claims, state.fresh = tuple(state.fresh), []
        state.waits = False
        state.answered.append((self.version, self.samples))
        if over and state.begun is not None:
            state.begun = None
            self._inside -= 1
        return Answer(worker, claims, over, self.version, release)

    # A checkpoint.

    def state_dict(self) -> State:
        """What a coordinator of the same scheme needs to go on, once its workers have joined anew."""
        return {
            "version": self.version,
            "samples": self.samples,
            "pass": self.number,
            "epoch": self.epoch,
            "claims": self._claims.state_dict(),
            "sizes": self.sizes.state_dict() if self._saved_sizes is None else self._saved_sizes,
            "sync": self.sync.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken, before any worker joins; what was not committed is done again."""
        self.version = cast("int", state["version"])
        self.samples = cast("int", state["samples"])
        self.number = cast("int", state["pass"])
        self.epoch = cast("int", state["epoch"])
        self._claims.load_state_dict(cast("State", state["claims"]))
        sizes = cast("State", state["sizes"])
        if "groups" in sizes:
            self._saved_sizes = sizes
            self._limits.load_state_dict(cast("State", sizes["limits"]))
        else:
            self.sizes.load_state_dict(sizes)
        self.sync.load_state_dict(cast("State", state["sync"]))

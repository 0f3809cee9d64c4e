"""Decides the servers' next step: combines the policy of *how far ahead* with the samples, sizes and passes.

Events in, commands out. The driver (the server process, the simulator) carries out the commands in their order before
the next event. The coordinator knows workers by rank, and no processes, connections or tensors. The time per event does
not grow with the workers, unless it concerns all: start or end of a pass, a whole barrier, new groups.
"""

from collections.abc import Sequence
from typing import cast, final

from evenstep.core.coordinate.commands import Answer, Apply, Arrival, CoordinatorCommand, Given, PushKey
from evenstep.core.coordinate.passes import Passes
from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.coordinate.worker import JoinedWorker, hand_out
from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.groups import Regroup
from evenstep.core.load.base import Load
from evenstep.core.samples.claims import Claim, Claims
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.sync.base import Command, Commit, Push, Release, Sync
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import Problem, State


@final
class Coordinator:
    """Makes the decisions of a run on servers, one event after another.

    A *pass* is one loop over the prepared loader, counted from 0; its `epoch` is the number that the script gave it, on
    which the order of its samples depends. All workers share the samples of a pass, and it ends for all together. A
    worker in the pass is *active* while the sync policy has it, and *resting* while it waits for samples that others
    may give back or for the end of the pass; in between it is about to rest.

    If workers go in step, nothing starts before each worker of the problem has begun or left, because the samples of an
    iteration are one slice of the epoch, which all share.

    An event that the worker's state does not allow raises ProtocolError and changes nothing.

    Every minimum of the `problem`, which is that of all workers of the run, is at least 1. An epoch has `length`
    positions, with `drop_last` without a last global batch that is not full.

    Attributes:
        version: Commits so far.
        samples: Samples committed so far.
        sizes: The workers that are here, and their batch sizes.
        passes: The current pass, and the workers that are in it or wait for a later one.
        claims: The samples of the pass.
    """

    def __init__(self, *, sync: Sync, load: Load, problem: Problem, length: int, drop_last: bool = False) -> None:
        self.version = 0
        self.samples = 0
        self.sizes = Sizes(load, problem)
        self._sync = sync_policy(sync, problem.workers)
        self._in_step = sync.in_step
        self._whole = problem.global_batch_size
        self._length = length - length % self._whole if drop_last else length
        self.claims = Claims(0)
        self.passes = Passes()
        self._workers: dict[int, JoinedWorker] = {}
        self._iterations: dict[int, int] = {}  # Kept for workers that have left.
        self._resting: dict[int, None] = {}  # In the order in which they asked.
        self._ended: set[int] = set()  # They rest and take no more samples, because their loops have ended.
        self._awaited = set(range(problem.workers))  # The workers that have neither begun nor left.
        # Pushes to be committed by worker and iteration, each with its claim and the samples that its weights had seen.
        self._pending: dict[tuple[int, int], tuple[Arrival, Claim, int]] = {}

    def awaits(self, worker: int) -> bool:
        """True if this worker of the problem has neither joined nor been given up."""
        return worker in self._awaited and worker not in self._workers

    def in_loop(self, worker: int) -> bool:
        """True if a worker that leaves now does so in the middle of a pass, perhaps after its loop has ended early."""
        state = self._workers.get(worker)
        stopped = state is not None and state.stopped_in == self.passes.number and not self.claims.over
        return stopped or worker in self.passes

    def waited_for(self) -> list[int]:
        """The workers that others wait for and that do not wait themselves, ascending. Looks at all workers."""
        waited, passes = set(self._sync.waited_for()), self.passes
        if self._resting:
            waited.update(worker for worker, state in self._workers.items() if state.claims)
        if self._ended or (passes.waiting and passes.inside):
            waited.update(filter(passes.is_inside, self._workers))
        elif passes.waiting and self._in_step:
            waited.update(worker for worker in self._workers if worker not in passes)
        if not self._may_run and (self._resting or passes.waiting):
            waited |= self._awaited & self._workers.keys()
        return sorted(worker for worker in waited if not self._workers[worker].waits)

    def join(self, worker: int) -> None:
        """A worker joins; it computes nothing before it begins a pass."""
        if worker in self._workers:
            raise ProtocolError(f"worker {worker} joined although it is here")
        self._workers[worker] = JoinedWorker(worker, self._iterations.pop(worker, 0))
        self.sizes.join(worker)

    def leave(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker has finished, has died or never came: its open claims go back, and no worker waits for it."""
        commands: list[CoordinatorCommand] = []
        if not self.awaits(worker):
            self._known(worker)
            self.sizes.leave(worker)
            commands = self._stop(worker, now)
            self._iterations[worker] = self._workers.pop(worker).iteration
        self._awaited.discard(worker)
        return commands + self._go_on(now)

    def begin(
        self,
        worker: int,
        number: int,
        epoch: int,
        now: float,
        *,
        ahead: int = 0,
        costs: PassCosts | None = None,
    ) -> list[CoordinatorCommand]:
        """A worker begins the pass of this number, or waits until it opens. If the pass is over, the answer says so.

        `ahead` is the number of claims to give it besides the one that it computes on, to continue with while it is
        held. With `costs`, sizes count average samples in this pass, and claims are sized by cost. DisagreementError if
        the others run that pass as another epoch.
        """
        state = self._known(worker)
        self.passes.check_epoch(worker, number, epoch)
        commands = self._stop(worker, now)
        self._awaited.discard(worker)
        state.ahead = ahead
        if number < self.passes.number:
            commands.append(self._answer(state, True))
            return commands + self._go_on(now)
        self.passes.enter(worker, number, epoch, costs)
        state.waits = True
        if number == self.passes.number:
            self._resting[worker] = None
            if costs is not None and self.claims.costs.alike:  # After a restart within the pass.
                self.claims.weigh(costs)
        return commands + self._go_on(now)

    def push(self, arrival: Arrival, now: float) -> list[CoordinatorCommand]:
        """An active worker's gradients are staged on every shard. Its older claims are finished."""
        worker, claim, version, samples = arrival.key[0], arrival.claim, arrival.version, arrival.samples
        state = self._known(worker)
        older = state.older_than(claim)
        if older and self._in_step:
            raise ProtocolError(f"worker {worker} pushed the claim {claim}, but holds {state.held} of earlier slices")
        samples_seen = state.samples_seen(version)
        iteration = state.iteration + 1
        if self.sizes.failure is not None:
            raise ConfigError(self.sizes.failure)
        # Before any change, because the policy refuses a push of a worker that it holds.
        decided = self._sync.on_push(
            Push(worker, iteration, samples, arrival.units, samples / self._whole, version), now
        )
        state.iteration = iteration
        state.waits = True
        if older:
            state.finish(self.claims, older)
        finished, state.claims = state.claims[0], state.claims[1:]
        self.sizes.observe(worker, arrival.row)
        if samples:
            self._pending[worker, iteration] = arrival, finished, samples_seen
        else:
            self.claims.finish(finished)
        commands = self._carry_out(decided, now)
        if self._resting or self._ended or not self.passes.inside:
            commands += self._go_on(now)
        return commands

    def more(self, worker: int, ahead: int) -> list[CoordinatorCommand]:
        """A computing worker asks for claims until it has `ahead` besides the current one; it does not wait."""
        state = self._known(worker)
        if self._in_step or state.waits or not state.claims:
            raise ProtocolError(f"worker {worker} asked for more samples than those that it computes on")
        state.ahead = max(ahead, state.ahead)
        if len(state.claims) <= state.ahead:
            hand_out([state], self.claims, self.sizes, in_step=False)
        claims, state.fresh = state.fresh, ()
        return [Given(worker, claims)]

    def rest(
        self, worker: int, now: float, *, done: int | None = None, ended: bool = False
    ) -> list[CoordinatorCommand]:
        """A worker asks for more and waits for it, or for the end of the pass.

        Its claims up to the number `done` are finished, and the others go back. If its loop has `ended`, it takes no
        more and waits until the pass is over or all workers in it have ended.
        """
        state = self._known(worker)
        if state.waits or (state.active and self._in_step) or not self.passes.is_inside(worker):
            raise ProtocolError(f"worker {worker} may not rest: it is not in the pass, waits, or holds {state.held}")
        if done is not None:
            state.finish(self.claims, state.older_than(done) + 1)
        commands = self._deactivate(worker, now)
        state.waits = True
        if ended:
            self._ended.add(worker)
        else:
            self._resting[worker] = None
        return commands + self._go_on(now)

    def stop(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """A worker has left its loop before the end: the claims that it did not push go back."""
        state = self._known(worker)
        commands = self._stop(worker, now) + self._go_on(now)
        state.stopped_in = self.passes.number
        return commands

    def _known(self, worker: int) -> JoinedWorker:
        if worker not in self._workers:
            raise ProtocolError(f"worker {worker} has not joined, or was given up for dead")
        return self._workers[worker]

    def _stop(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """Take the worker out of its pass, except for a push that has arrived."""
        self.passes.leave(worker)
        self._workers[worker].waits = False
        self._resting.pop(worker, None)
        self._ended.discard(worker)
        return self._deactivate(worker, now)

    def _deactivate(self, worker: int, now: float) -> list[CoordinatorCommand]:
        """The worker computes on nothing: its claims go back, and no other worker is held for it."""
        state = self._workers[worker]
        state.give_back(self.claims)
        active, state.active = state.active, False
        return self._carry_out(self._sync.on_leave(worker, now), now) if active else []

    @property
    def _may_run(self) -> bool:
        return not (self._in_step and self._awaited)

    def _go_on(self, now: float) -> list[CoordinatorCommand]:
        """Answer all workers that no longer need to wait, and open the next pass if its workers have come."""
        commands = self._serve_resting(now) if self._resting or self._ended else []
        while not self.passes.inside and self._open_next():
            commands += self._serve_resting(now)
        return commands

    def _serve_resting(self, now: float) -> list[CoordinatorCommand]:
        """Start resting workers if samples are left for them, and end the pass for them if it is over."""
        commands: list[CoordinatorCommand] = []
        while self._resting and self.claims.unclaimed and self._may_run:
            # One by one while there is work, but all together for a slice.
            waking = sorted(self._resting) if self._in_step else [next(iter(self._resting))]
            decided: list[Command] = []
            for worker in waking:
                del self._resting[worker]
                self._workers[worker].active = True
                decided += self._sync.on_join(worker, now)
            commands += self._carry_out(decided, now)
        if self.claims.over or len(self._ended) == self.passes.inside:
            commands += [self._answer(self._workers[each], True) for each in sorted(self._ended.union(self._resting))]
            self._resting.clear()
            self._ended.clear()
        return commands

    def _open_next(self) -> bool:
        """Open the next pass, if a worker waits for one and, in step, all have come."""
        waiting = self.passes.waiting
        if not waiting or not self._may_run or (self._in_step and waiting < len(self._workers)):
            return False
        self._resting.update(dict.fromkeys(self.passes.open_next()))
        self.claims = Claims(self._length, self.passes.costs)
        self.sizes.begin_epoch(self.passes.epoch)
        return True

    def _carry_out(self, decided: Sequence[Command], now: float) -> list[CoordinatorCommand]:
        """Complete the sync policy's commands with samples and sizes."""
        commands: list[CoordinatorCommand] = []
        while decided:
            released: list[JoinedWorker] = []
            for command in decided:
                if type(command) is Release:
                    released.append(self._workers[command.worker])
                elif self._in_step and type(command) is Regroup:
                    self.sizes.regroup(command.groups)
                    commands.append(command)
            hand_out(released, self.claims, self.sizes, in_step=self._in_step)
            further: list[Command] = []
            for command in decided:
                if type(command) is Commit:
                    commands.append(self._apply(command))
                elif type(command) is Release:
                    worker = command.worker
                    state = self._workers[worker]
                    over = False
                    if not state.claims:
                        # A worker with nothing to compute must not hold back others.
                        state.active = False
                        further += self._sync.on_leave(worker, now)
                        over = self.claims.over
                    commands.append(self._answer(state, over, command))
            decided = further
        return commands

    def _apply(self, commit: Commit) -> Apply:
        version, before, pushes = self.version, self.samples, commit.pushes
        self.version = version + 1
        if len(pushes) == 1:  # The common case; what follows does the same for several.
            key, oldest, fewest = self._finish(pushes[0])
            return Apply(((key, 1.0),), commit.share, version - oldest, (before - fewest) / self._whole, version + 1)
        units = sum([push.units for push in pushes])
        keys, versions, samples = zip(*[self._finish(push) for push in pushes], strict=True)
        weights = [push.units / units if units else 1 / len(pushes) for push in pushes]
        weighted = tuple(zip(keys, weights, strict=True))
        return Apply(
            weighted, commit.share, version - min(versions), (before - min(samples)) / self._whole, version + 1
        )

    def _finish(self, push: Push) -> tuple[PushKey, int, int]:
        """Count this push as committed; return its key, and the versions and samples that its weights had seen."""
        arrival, claim, samples_seen = self._pending.pop((push.worker, push.iteration))
        self.claims.finish(claim)
        self.samples += arrival.samples
        return arrival.key, arrival.version, samples_seen

    def _answer(self, state: JoinedWorker, over: bool, release: Release | None = None) -> Answer:
        worker, claims, state.fresh = state.rank, state.fresh, ()
        state.waits = False
        whole = over or not state.answered
        state.answered = (*state.answered, (self.version, self.samples))[-1 - state.ahead :]
        if over:
            self.passes.leave(worker)
        return Answer(worker, claims, over, whole, self.version, release)

    def state_dict(self) -> State:
        """The state from which a coordinator of the same scheme continues once its workers have joined again."""
        unfinished = [claim for state in self._workers.values() for claim in state.claims]
        unfinished += [claim for _, claim, _ in self._pending.values()]
        return {
            "version": self.version,
            "samples": self.samples,
            "pass": self.passes.number,
            "epoch": self.passes.epoch,
            "claims": self.claims.state_dict(unfinished),
            "sizes": self.sizes.state_dict(),
            "sync": self._sync.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state, before any worker joins; work that was not committed is done again."""
        self.version = cast("int", state["version"])
        self.samples = cast("int", state["samples"])
        self.passes.number = cast("int", state["pass"])
        self.passes.epoch = cast("int", state["epoch"])
        self.claims.load_state_dict(cast("State", state["claims"]))
        self.sizes.load_state_dict(cast("State", state["sizes"]))
        self._sync.load_state_dict(cast("State", state["sync"]))

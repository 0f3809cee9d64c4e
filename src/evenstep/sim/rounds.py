"""Federated training in virtual time, with and without rounds: the decisions of the Flower integration."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple, Protocol, final

import numpy as np

from evenstep.cluster.record import FROM_ONE, NOT_NEGATIVE, require_ranges
from evenstep.cluster.slowness import Chain, Disturbance
from evenstep.core.errors import ConfigError
from evenstep.core.rounds import AsynchronousRounds, Counted, Mode, RoundTimes, RoundWork, Step, Work, staleness_factor
from evenstep.core.rounds.times import required_patience
from evenstep.schemes import Scheme, parse_scheme
from evenstep.schemes.scheme import one_of

_NEVER: Final = float("inf")
_INSTANT: Final = 1e-9  # Seconds, for a client that takes none.
_LEAVE, _JOIN, _REPLY = range(3)
"""The kinds of events, in the order of handling if their times are equal."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A node: its data, speed, link and absences.

    Attributes:
        examples: The size of its dataset.
        seconds_per_sample, fixed_seconds: A local step on x samples takes fixed_seconds + x * seconds_per_sample.
        message_seconds: Seconds to receive the model and send its change back, together.
        away: Intervals of virtual seconds, in order. Work that is not finished when one begins is lost. If the last one
            ends at infinity, the client does not come back.

    Raises:
        ConfigError: A number is out of range, or the intervals are not in order.
    """

    examples: Annotated[int, FROM_ONE]
    seconds_per_sample: Annotated[float, NOT_NEGATIVE]
    fixed_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    message_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    away: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        require_ranges(self)
        moments = [moment for interval in self.away for moment in interval]
        if moments and not (moments[0] >= 0.0 and all(earlier < later for earlier, later in pairwise(moments))):
            raise ConfigError(
                f"a client cannot be away in {self.away}: give intervals (begin, end) of at least 0 s, in order and"
                " with time between them"
            )

    def leaves_after(self, now: float) -> float:
        """The time when the client is next away: `now` if it is away."""
        return next((max(now, begin) for begin, end in self.away if end > now), _NEVER)

    def back_after(self, now: float) -> float:
        """The time when the client is next present: `now` unless it is away."""
        return next((end for begin, end in self.away if begin <= now < end), now)


class Learner(Protocol):
    """Trains a model at the times that the simulator decides, for accuracy over virtual time."""

    def begin(self, client: int, number: int, work: Work) -> None:
        """Train the client's piece of work `number`, from the newest model."""

    def update(self, parts: Sequence[Counted], now: float) -> None:
        """Add the mean of these pieces' changes, each times its factor and weighted by examples, to the model."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedScenario:
    """A federated training to simulate.

    Attributes:
        clients: All clients.
        scheme: `lb-bsp` or `bsp` with rounds; `bsp:engine=server`, `ssp`, `dssp`, `asp` or `grouped` without.
        rounds: The length, in rounds of all clients.
        batch_size, steps: The mean batch size and number of local steps of a client.
        mode, patience, late: As in `LoadBalanced`.
        buffer, rate: As in `Asynchronous`.
        fraction: The fraction of the present clients that take part in a round; without rounds all take part.
        disturbance: Slows the clients' compute; an iteration is a piece of work.
        notice_seconds: How long the server takes to notice that a client is away.
        seed: The seed for the choice of clients for a round.
    """

    clients: tuple[Client, ...]
    scheme: Scheme | str = "lb-bsp"
    rounds: Annotated[int, FROM_ONE] = 10
    batch_size: Annotated[int, FROM_ONE] = 32
    steps: Annotated[int, FROM_ONE] = 10
    mode: Mode = "batch"
    patience: float | None = None
    late: Literal["next", "drop"] = "next"
    buffer: int = 1
    rate: Literal["share", "raw"] = "share"
    fraction: float = 1.0
    disturbance: Disturbance = field(default_factory=Chain)
    notice_seconds: Annotated[float, NOT_NEGATIVE] = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_ranges(self)
        required_patience(self.patience)
        one_of("late", self.late, ("next", "drop"))
        if not self.clients:
            raise ConfigError("there is no client to train on: give at least one")
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"a round cannot have {self.fraction} of the clients: use a fraction above 0, up to 1")


class Update(NamedTuple):
    """An update of the model: its time, the progress in rounds' worth, its replies and the mean updates they missed."""

    seconds: float
    progress: float
    replies: int
    stale: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedRun:
    """The result of a simulation.

    Attributes:
        seconds: Virtual seconds from the start to the last update.
        updates: All updates, in order.
        pieces: By client, the number of its pieces of work in the model.
        works: By client, its last work.
        computed: The fraction of the clients' present time in which they computed.
    """

    seconds: float
    updates: tuple[Update, ...]
    pieces: tuple[int, ...]
    works: tuple[Work | None, ...]
    computed: float


def simulate_rounds(scenario: FederatedScenario, learner: Learner | None = None) -> FederatedRun:
    """Run the scenario in virtual time; the same scenario gives the same result.

    Raises:
        ConfigError: Federated training cannot follow the scheme, or the clients cannot be grouped.
    """
    scheme = parse_scheme(scenario.scheme)
    if scheme.period is not None or (scheme.served is not None and scheme.load.follows_speed):
        raise ConfigError(
            f"federated training cannot follow the whole of {scheme.name}: use lb-bsp or bsp for rounds, or ssp, dssp,"
            " asp or grouped with equal sizes for training without rounds"
        )
    run = _Run(scenario, learner)
    if scheme.served is None:
        run.in_rounds(RoundWork(scheme.load, scenario.mode))
    else:
        count, buffer, rate = len(scenario.clients), scenario.buffer, scenario.rate
        run.without(AsynchronousRounds(scheme.sync, count, scenario.rounds, buffer=buffer, rate=rate))
    return run.result()


class _Asked(NamedTuple):
    """A piece of work: the time of its reply (or when its loss is noticed), and its seconds of compute."""

    number: int
    round: int
    work: Work
    begun: float
    comes: float
    lost: bool
    compute: float


@final
class _Run:
    def __init__(self, scenario: FederatedScenario, learner: Learner | None) -> None:
        self._of, self._learner = scenario, learner
        count = len(scenario.clients)
        self._numbers, self._pieces = [0] * count, [0] * count
        self._works: list[Work | None] = [None] * count
        self._updates: list[Update] = []
        self._computed = self._now = 0.0

    def result(self) -> FederatedRun:
        there = sum(
            self._now - sum(max(0.0, min(end, self._now) - begin) for begin, end in client.away)
            for client in self._of.clients
        )
        return FederatedRun(
            seconds=self._now,
            updates=tuple(self._updates),
            pieces=tuple(self._pieces),
            works=tuple(self._works),
            computed=self._computed / there if there else 0.0,
        )

    def _ask(self, index: int, number: int, work: Work) -> _Asked:
        client, now = self._of.clients[index], self._now
        piece = self._numbers[index]
        self._numbers[index] += 1
        self._works[index] = work
        natural = work.steps * (client.fixed_seconds + work.batch_size * client.seconds_per_sample)
        compute = self._of.disturbance.seconds(
            worker=index, iteration=piece, batch_size=work.batch_size, natural_seconds=natural
        )
        comes, leaves = now + client.message_seconds + compute, client.leaves_after(now)
        lost = leaves < comes
        if lost:
            comes = leaves + self._of.notice_seconds
        else:
            self._computed += compute
        if self._learner is not None:
            self._learner.begin(index, piece, work)
        return _Asked(piece, number, work, now, comes, lost, compute)

    def _update(self, parts: Sequence[Counted], progress: float) -> None:
        for part in parts:
            self._pieces[part.node] += 1
        stale = sum(part.stale for part in parts) / len(parts)
        self._updates.append(Update(self._now, progress, len(parts), stale))
        if self._learner is not None:
            self._learner.update(parts, self._now)

    @staticmethod
    def _back(when: float) -> float:
        if when == _NEVER:
            raise ConfigError("all clients leave for good before the last round: give one of them an `away` that ends")
        return when

    # With rounds.

    def in_rounds(self, work: RoundWork) -> None:
        of, times = self._of, RoundTimes()
        generator = np.random.default_rng(of.seed)
        asked: dict[int, _Asked] = {}
        for number in range(1, of.rounds + 1):
            free = self._free(asked)
            while not free and not asked:
                self._now = self._back(min(client.back_after(self._now) for client in of.clients))
                free = self._free(asked)
            count = max(round(of.fraction * len(free)), min(1, len(free)))
            chosen = sorted(generator.choice(free, size=count, replace=False).tolist()) if count < len(free) else free
            plan = work.plan(chosen, of.batch_size, of.steps)
            limit = times.deadline(work.seconds(plan), of.patience)
            for index, each in plan.items():
                asked[index] = self._ask(index, number, each)
            # A round without free clients waits for the first late reply.
            ends = [asked[index].comes for index in plan]
            end = max(ends) if ends else min(each.comes for each in asked.values())
            if ends and limit is not None:
                end = min(end, self._now + limit)
            self._now = end
            replies = {index: each for index, each in asked.items() if each.comes <= end}
            asked = {index: each for index, each in asked.items() if index not in replies}
            kept = {index: each for index, each in replies.items() if not each.lost}
            self._count(kept, number, work, times)

    def _count(self, replies: dict[int, _Asked], number: int, work: RoundWork, times: RoundTimes) -> None:
        """Learn from the replies that came in round `number`, and update the model."""
        seconds = {
            index: (max(each.compute, _INSTANT), max(each.comes - each.begun, _INSTANT))
            for index, each in replies.items()
        }
        times.observe(seconds)
        parts = []
        for index, reply in replies.items():
            work.observe(index, reply.work, times.bounded(*seconds[index]))
            behind = number - reply.round
            if behind == 0 or self._of.late == "next":
                parts.append(Counted(index, reply.number, staleness_factor(behind), behind, behind))
        if parts:
            self._update(parts, float(number))

    def _free(self, asked: dict[int, _Asked]) -> list[int]:
        now = self._now
        return [i for i, each in enumerate(self._of.clients) if i not in asked and each.leaves_after(now) > now]

    # Without.

    def without(self, rounds: AsynchronousRounds) -> None:
        of = self._of
        self._rounds = rounds
        self._asked: dict[int, _Asked] = {}
        self._queue: list[tuple[float, int, int, int]] = []  # Time, kind, client, number.
        work = Work(of.batch_size, of.steps)
        for index, client in enumerate(of.clients):
            if client.leaves_after(0.0) > 0.0:
                self._queue.append((0.0, _JOIN, index, 0))
            for begin, end in client.away:
                noticed = begin + of.notice_seconds if begin > 0.0 else 0.0
                if begin > 0.0:
                    self._queue.append((noticed, _LEAVE, index, 0))
                self._queue.append((max(end, noticed), _JOIN, index, 0))
        heapq.heapify(self._queue)
        while not rounds.done and self._queue:
            when, kind, index, number = heapq.heappop(self._queue)
            self._now = self._back(when)
            if kind == _LEAVE:
                self._asked.pop(index, None)
                step = rounds.leave(index, self._now) if index in rounds.nodes else Step()
            elif kind == _JOIN:
                step = rounds.join(index, self._now)
            elif index in self._asked and self._asked[index].number == number:
                del self._asked[index]
                step = rounds.reply(index, of.clients[index].examples, self._now)
            else:
                continue  # Its client has left.
            self._carry(step, work)
        self._carry(rounds.finish(self._now), work)

    def _carry(self, step: Step, work: Work) -> None:
        for update in step.updates:
            self._update(update, self._rounds.progress)
        for index in step.start:
            asked = self._asked[index] = self._ask(index, 0, work)
            if not asked.lost:
                heapq.heappush(self._queue, (asked.comes, _REPLY, index, asked.number))

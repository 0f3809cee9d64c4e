"""Checks that experts, load policies and sync policies keep the promises of their interfaces.

Each function takes a factory and raises AssertionError if a promise is broken.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

import numpy as np

from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.checked import wrong_sizes
from evenstep.core.load.expert import Expert
from evenstep.core.sync import Command, Push, Regroup, SyncPolicy
from evenstep.core.values import UNLIMITED, IntArray, Problem, Reports, State
from evenstep.testing.watched import Watched

_ITERATIONS: Final = 60
_EVENTS: Final = 400
_SEEDS: Final = 5
_Event: TypeAlias = Callable[[SyncPolicy], list[Command]]


def check_expert(factory: Callable[[int], Expert], *, workers: int = 4) -> None:
    """Check the promises of an expert, on measurements from tiny to huge and with workers without measurements.

    * Once every worker has been measured, its speeds are finite float64 above 0, of shape [workers] or [any, workers].
    * The same measurements lead to the same speeds, and asking for them changes nothing.
    * Its state survives JSON: an expert that loads it continues bit for bit.

    Args:
        factory: Makes a new expert for a number of workers.
        workers: The number of workers.
    """
    generator = np.random.default_rng(0)
    one, other, resumed = factory(workers), factory(workers), factory(workers)
    for iteration in range(_ITERATIONS):
        reports = _reports(generator, workers)
        measured = (generator.random(workers) < 0.8) | (iteration == 0)
        paces = np.where(measured, reports.compute_microseconds / reports.samples, 0.0)
        if iteration % 10 == 9:
            paces = paces * 10.0 ** generator.integers(-6, 9)
        for expert in (one, other, resumed):
            expert.observe(reports, paces, measured)
        speeds = one.speeds()
        assert speeds.dtype == np.float64, f"speeds must be float64, not {speeds.dtype}"
        assert speeds.shape[-1] == workers, f"{workers} workers got speeds of shape {speeds.shape}"
        assert np.isfinite(speeds).all(), f"{speeds} are not finite"
        assert (speeds > 0.0).all(), f"{speeds} are not all above 0"
        assert np.array_equal(speeds, one.speeds()), "asking for speeds changed them"
        assert np.array_equal(speeds, other.speeds()), "the same measurements led to different speeds"
        assert np.array_equal(speeds, resumed.speeds()), "an expert continued differently after a checkpoint"
        resumed = factory(workers)
        resumed.load_state_dict(_through_json(one.state_dict()))


def check_load_policy(factory: Callable[[int], LoadPolicy], *, workers: int = 4, global_batch_size: int = 128) -> None:
    """Check the promises of a load policy.

    * Its sizes satisfy the problem, or it raises ConfigError.
    * The same reports lead to the same sizes.
    * Writing into an array that it returned does not change it.
    * Its state survives JSON: a policy that loads it continues bit for bit.

    Args:
        factory: Makes a new policy for a number of workers.
        workers: The number of workers, at least 2.
        global_batch_size: A batch that the policy accepts for them, a multiple of 8 and at least 16 per worker.
    """
    one, other = factory(workers), factory(workers)
    resumed = factory(workers)
    generator = np.random.default_rng(0)
    for _ in range(_ITERATIONS):
        for problem in _problems(workers, global_batch_size):
            sizes = _check_sizes(one, problem, must_succeed=problem.global_batch_size == global_batch_size)
            again = _check_sizes(other, problem, must_succeed=False)
            assert _same(sizes, again), f"the same reports led to the sizes {sizes} and {again}"
            resumed.load_state_dict(_through_json(one.state_dict()))
            after = _check_sizes(resumed, problem, must_succeed=False)
            assert _same(sizes, after), f"sizes {sizes} became {after} after a checkpoint"
            if sizes is not None and sizes.flags.writeable:
                sizes[:] = -1
        reports = _reports(generator, workers)
        one.observe(reports)
        other.observe(reports)
    assert _through_json(one.state_dict()) == _through_json(other.state_dict())


def check_sync_policy(factory: Callable[[], SyncPolicy], *, workers: int = 5) -> None:
    """Check the promises of a sync policy, with workers of different speeds that join, push and leave at random.

    * It keeps each promise that `Watched` checks.
    * An impossible event raises ProtocolError and changes nothing.
    * The same events lead to the same commands.
    * Its state survives JSON: once all workers have left, a policy that loads it decides like the old one.
    * If all running workers keep pushing, no worker starves.

    Args:
        factory: Makes a new policy.
        workers: The number of workers, at least 2.
    """
    for seed in range(_SEEDS):
        generator = random.Random(seed)
        one = Watched(factory())
        last = _check_same_commands(generator, one, factory(), workers, after=0)
        for worker in [*one.running, *one.held]:
            one.on_leave(worker, float(last))
        resumed = factory()
        resumed.load_state_dict(_through_json(one.state_dict()))
        _check_same_commands(generator, one, resumed, workers, after=last)
    _check_no_worker_starves(Watched(factory()), workers)


def _problems(workers: int, batch: int) -> list[Problem]:
    """An ordinary problem, the last slice of an epoch, tight limits, and multiples."""
    ones = np.ones(workers, dtype=np.int64)
    share = batch // workers
    return [
        Problem(global_batch_size=batch, minimum=ones, maximum=ones * UNLIMITED),
        Problem(global_batch_size=workers + 3, minimum=ones, maximum=ones * UNLIMITED),
        Problem(global_batch_size=batch, minimum=ones, maximum=ones * batch, multiple=1),
        Problem(global_batch_size=batch - 8, minimum=0 * ones, maximum=ones * UNLIMITED, multiple=4),
        Problem(global_batch_size=batch - 1, minimum=ones * (share // 2), maximum=ones * (share + 2)),
    ]


def _check_sizes(policy: LoadPolicy, problem: Problem, *, must_succeed: bool) -> IntArray | None:
    try:
        sizes = policy.allocate(problem).sizes
    except ConfigError:
        assert not must_succeed, f"the policy refused {problem}"
        return None
    wrong = wrong_sizes(sizes, problem)
    assert wrong is None, f"the policy gave {wrong}"
    return sizes


def _reports(generator: np.random.Generator, workers: int) -> Reports:
    microseconds = generator.integers(1, 10**6, workers)
    return Reports(
        samples=generator.integers(1, 100, workers),
        compute_microseconds=microseconds,
        forecast=1000 * microseconds * generator.integers(0, 2),
        largest_size=np.full(workers, UNLIMITED, dtype=np.int64),
    )


def _check_same_commands(generator: random.Random, one: Watched, other: SyncPolicy, workers: int, *, after: int) -> int:
    """Send the same random events to both, and impossible ones to `one` first; return the time of the last."""
    speeds = [generator.lognormvariate(0.0, 1.0) for _ in range(workers)]
    now = after
    for number in range(after, after + _EVENTS):
        now += generator.randrange(10)
        for impossible in _impossible_events(one, workers, float(now)):
            try:
                impossible(one)
            except ProtocolError:
                continue
            raise AssertionError("a policy must raise ProtocolError if a worker's event is impossible in its state")
        event = _random_event(generator, one, speeds, number, float(now))
        # A new policy announces its groups at the first event.
        commands, again = (
            [command for command in event(policy) if not isinstance(command, Regroup)] for policy in (one, other)
        )
        assert commands == again, f"the same events led to {commands} and {again}"
    return now


def _random_event(
    generator: random.Random, watched: Watched, speeds: Sequence[float], number: int, now: float
) -> _Event:
    """Usually a push of a running worker, more often of a fast one; sometimes a worker leaves or joins."""
    joined = sorted({*watched.running, *watched.held})
    absent = [worker for worker in range(len(speeds)) if worker not in joined]
    if absent and (not joined or generator.random() < 0.1):
        return _join(generator.choice(absent), now)
    if generator.random() < 0.03:
        return _leave(generator.choice(joined), now)
    (worker,) = generator.choices(watched.running, [speeds[each] for each in watched.running])
    return _push(worker, number, generator.randrange(4), now)


def _impossible_events(watched: Watched, workers: int, now: float) -> list[_Event]:
    """Events in which a joined worker joins, a held and an absent worker push, and an absent worker leaves."""
    joined = {*watched.running, *watched.held}
    absent = [worker for worker in range(workers) if worker not in joined][:1]
    return [
        *(_join(worker, now) for worker in sorted(joined)[:1]),
        *(_push(worker, -1, 1, now) for worker in [*watched.held[:1], *absent]),
        *(_leave(worker, now) for worker in absent),
    ]


def _join(worker: int, now: float) -> _Event:
    return lambda policy: policy.on_join(worker, now)


def _push(worker: int, iteration: int, samples: int, now: float) -> _Event:
    push = Push(worker=worker, iteration=iteration, samples=samples, units=samples, share=samples / 16, version=0)
    return lambda policy: policy.on_push(push, now)


def _leave(worker: int, now: float) -> _Event:
    return lambda policy: policy.on_leave(worker, now)


def _check_no_worker_starves(policy: Watched, workers: int) -> None:
    for worker in range(workers):
        policy.on_join(worker, 0.0)
    for number in range(_ITERATIONS * workers):
        for worker in policy.running:
            _push(worker, number, 1, float(number))(policy)
    assert min(policy.pushes.values()) >= _ITERATIONS, f"a worker starves: pushes by worker are {policy.pushes}"


def _same(one: IntArray | None, other: IntArray | None) -> bool:
    return one is other if one is None or other is None else bool(np.array_equal(one, other))


def _through_json(state: State) -> State:
    return cast("State", json.loads(json.dumps(state, allow_nan=False)))

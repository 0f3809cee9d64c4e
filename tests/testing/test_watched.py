"""Policies that each break one promise: the watch and the conformance suite must find every one of them."""

import pytest
from msgspec.structs import replace

from evenstep.core.errors import ProtocolError
from evenstep.core.sync import Bounded, Commit, Push, Release
from evenstep.testing.conformance import check_sync_policy
from evenstep.testing.watched import Watched


class Broken:
    """`Bounded(bound=1)`, with its commands changed on their way out."""

    def __init__(self):
        self.policy = Bounded(bound=1).policy(4)

    def on_join(self, worker, now):
        return self.changed(self.policy.on_join(worker, now))

    def on_push(self, push, now):
        return self.changed(self.policy.on_push(push, now))

    def on_leave(self, worker, now):
        return self.changed(self.policy.on_leave(worker, now))

    def state_dict(self):
        return self.policy.state_dict()

    def load_state_dict(self, state):
        self.policy.load_state_dict(state)

    def changed(self, commands):
        return commands


class CommitsTwice(Broken):
    def changed(self, commands):
        return [*(command for command in commands if isinstance(command, Commit)), *commands]


class CommitsNothing(Broken):
    def changed(self, commands):
        return [command for command in commands if isinstance(command, Release)]


class CommitsEmptyPushes(Broken):
    def on_push(self, push, now):
        return [Commit(pushes=(push,), share=1.0), *super().on_push(replace(push, samples=0), now)]


class ReleasesTwice(Broken):
    def changed(self, commands):
        return [*commands, *(command for command in commands if isinstance(command, Release))]


class ForgetsTheHeld(Broken):
    def on_leave(self, worker, now):
        super().on_leave(worker, now)
        return []


class OverstepsItsBound(Broken):
    def changed(self, commands):
        return [replace(c, bound=0) if isinstance(c, Release) else c for c in commands]


class MisstatesTheLead(Broken):
    def changed(self, commands):
        return [replace(c, lead=0) if isinstance(c, Release) else c for c in commands]


class MisstatesTheWait(Broken):
    def changed(self, commands):
        return [replace(c, held_seconds=0.0) if isinstance(c, Release) else c for c in commands]


class ForgivesAnything(Broken):
    def on_leave(self, worker, now):
        try:
            return super().on_leave(worker, now)
        except ProtocolError:
            return []


class LosesItsState(Broken):
    """Releases nobody but the slowest after a checkpoint, as a policy that came back with another bound."""

    def load_state_dict(self, state):
        self.policy = Bounded(bound=0).policy(4)


BROKEN = [
    CommitsTwice,
    CommitsNothing,
    CommitsEmptyPushes,
    ReleasesTwice,
    ForgetsTheHeld,
    OverstepsItsBound,
    MisstatesTheLead,
    MisstatesTheWait,
    ForgivesAnything,
    LosesItsState,
]


def test_an_unbroken_policy_conforms():
    check_sync_policy(Broken)


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.__name__ for broken in BROKEN])
def test_a_policy_that_breaks_a_promise_does_not_conform(broken):
    with pytest.raises(AssertionError):
        check_sync_policy(broken)


def test_the_watch_names_what_went_wrong():
    policy = Watched(CommitsTwice())
    policy.on_join(0, 0.0)
    with pytest.raises(AssertionError, match="was committed twice"):
        policy.on_push(Push(worker=0, iteration=0, samples=1, units=1, share=1.0, version=0), 1.0)

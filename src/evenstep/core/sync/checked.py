"""Checks the decisions of a user's own sync policy before they are carried out."""

from dataclasses import dataclass, field
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.core.groups import Regroup
from evenstep.core.shown import shown
from evenstep.core.sync.base import Command, Commit, Push, Release, Sync, SyncPolicy
from evenstep.core.values import State

_METHODS = ("on_join", "on_push", "on_leave", "waited_for", "state_dict", "load_state_dict")


def sync_policy(sync: Sync, workers: int) -> SyncPolicy:
    """Make a new policy. A user's policy is checked at every event; evenstep's own are checked by tests.

    Raises:
        ConfigError: The result of `sync.policy` is not a policy.
    """
    policy = sync.policy(workers)
    if type(policy).__module__.startswith("evenstep."):
        return policy
    missing = [name for name in _METHODS if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigError(
            f"policy() of the sync {type(sync).__name__} gave {shown(policy)}, which has no {missing[0]}(): return an"
            " evenstep.policies.SyncPolicy"
        )
    return CheckedSync(policy)


@final
@dataclass(slots=True)
class CheckedSync(SyncPolicy):
    """Wraps another policy and refuses commands that cannot be carried out or after which no worker would run.

    The error goes to the worker whose event it was. Every other worker gets it with its next event. Held workers are
    released for that, because the wrapped policy is not asked again.
    """

    _policy: SyncPolicy
    _running: set[int] = field(init=False, default_factory=set)
    _held: set[int] = field(init=False, default_factory=set)
    _uncommitted: set[Push] = field(init=False, default_factory=set)
    _failure: str | None = field(init=False, default=None)

    def on_join(self, worker: int, now: float) -> list[Command]:
        self._require_sound()
        commands = self._policy.on_join(worker, now)
        self._held.add(worker)
        return self._sound("on_join", commands)

    def on_push(self, push: Push, now: float) -> list[Command]:
        self._require_sound()
        commands = self._policy.on_push(push, now)
        self._running.discard(push.worker)
        self._held.add(push.worker)
        if push.samples:
            self._uncommitted.add(push)
        return self._sound("on_push", commands)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        commands = [] if self._failure else self._policy.on_leave(worker, now)
        self._running.discard(worker)
        self._held.discard(worker)
        try:
            return self._sound("on_leave", commands)
        except ConfigError:
            released: list[Command] = [Release(each, 0, None, 0.0) for each in sorted(self._held)]
            self._running |= self._held
            self._held.clear()
            return released

    def waited_for(self) -> list[int]:
        return self._policy.waited_for()

    def state_dict(self) -> State:
        return self._policy.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._policy.load_state_dict(state)

    def _sound(self, event: str, commands: list[Command]) -> list[Command]:
        """The commands if they are valid and all earlier ones were."""
        wrong = None if self._failure else self._wrong(commands)
        if wrong is not None:
            self._failure = f"{event}() of the sync policy {type(self._policy).__name__} {wrong}"
        self._require_sound()
        return commands

    def _require_sound(self) -> None:
        if self._failure:
            raise ConfigError(self._failure)

    def _wrong(self, commands: object) -> str | None:
        """The fault in the commands and its remedy; None if they are valid."""
        if not isinstance(commands, list):
            return f"gave {shown(commands)}: return a list of commands"
        for command in commands:
            if isinstance(command, Commit):
                if not command.pushes or not self._uncommitted.issuperset(command.pushes):
                    return "committed a push that is empty, committed already or unknown: commit each push once"
                self._uncommitted.difference_update(command.pushes)
            elif isinstance(command, Release):
                if command.worker not in self._held:
                    return f"released worker {command.worker}, which is not held: release a worker after its push"
                self._held.remove(command.worker)
                self._running.add(command.worker)
            elif not isinstance(command, Regroup):
                return f"gave the command {shown(command)}: use Commit and Release"
        if self._held and not self._running:
            return f"holds all workers ({sorted(self._held)}) for ever: release one of them"
        return None

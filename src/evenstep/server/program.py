"""The server program, `python -m evenstep.server.program SETTINGS`, which `runtime.server.process` starts.

It listens, says where in one line on its output, and serves until its input closes or it is told to end.
"""

import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import torch

from evenstep.core.errors import EvenstepError
from evenstep.launch.process import SECRET_VARIABLE
from evenstep.server.announce import Announcements
from evenstep.server.group.group import Group
from evenstep.server.group.member import GroupMember
from evenstep.server.host import Host
from evenstep.server.local_poller import LocalPoller
from evenstep.server.primary import BrokenServerError, Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.session import Session
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import JsonlRecorder
from evenstep.telemetry.say import say
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen
from evenstep.transport.stream import StreamConnection

POLL_SECONDS: Final = 0.25
"""How often a server looks who is silent and what is due."""
LAST_SECONDS: Final = 10.0
"""How long the other servers wait for what shard 0 still asks of them, when all are to end."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is told, as JSON; see `evenstep.launch.process.ServerSettings`."""

    index: int
    count: int
    workers: int
    snapshots: str
    scratch: str = ""
    host: int = 0
    listen: str = "127.0.0.1"
    port: int = 0
    resume: bool = False
    allow: tuple[str, ...] = ()
    shards: tuple[tuple[str, ...], ...] = ()
    parent: tuple[str, ...] = ()
    snapshot_seconds: float = 60.0
    heartbeat_seconds: float = 20.0
    name_lost: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the argument."""
        record: Mapping[str, Any] = json.loads(text)
        shards = tuple(tuple(addresses) for addresses in record.get("shards", ()))
        names = {name: tuple(record.get(name, ())) for name in ("allow", "parent")}
        return cls(**{**record, **names, "shards": shards})


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end."""
    settings = Settings.parse(arguments[0])
    # One thread of this process computes at a time; a pool for each would only be in the way.
    torch.set_num_threads(1)
    ended, asked = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        asked.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    try:
        serve(settings, secret, ended)
        if settings.scratch and not asked.is_set():
            shutil.rmtree(settings.scratch, ignore_errors=True)
    except BrokenServerError:
        traceback.print_exc()
        return 1
    except EvenstepError as error:
        say(f"server {settings.index}: {error}")
        return 1
    return 0


def serve(settings: Settings, secret: bytes, ended: threading.Event) -> None:
    """Listen, and serve until `ended` is set."""
    if settings.parent:
        _serve_group(settings, secret, ended)
        return
    snapshots = Snapshots(Path(settings.snapshots), settings.count)
    recorder = JsonlRecorder(Path(settings.snapshots).parent, settings.index, role="server")
    shard_state = ShardState(index=settings.index, count=settings.count, snapshots=snapshots, allow=settings.allow)
    parent = Announcements(sys.stdout.fileno())
    host = Host(settings.host, settings.workers) if settings.host and settings.index == 0 else None
    primary = (
        _primary(settings, secret, shard_state, snapshots, recorder, host or parent) if settings.index == 0 else None
    )
    service = _Service(settings, shard_state, primary, recorder, host)
    poller = LocalPoller()
    with _listening(settings, secret, ended, poller, service.open, parent):
        threading.Thread(target=_warm_up, name="evenstep-warm-up", daemon=True).start()
        service.run(ended, poller)
        snapshots.wait()
    recorder.close()


def _serve_group(settings: Settings, secret: bytes, ended: threading.Event) -> None:
    """The same for a server with a parent, of which nothing is kept."""
    group = Group(
        workers=settings.workers,
        connect=lambda: connect(settings.parent, secret=secret),
        patience_seconds=settings.heartbeat_seconds,
    )
    poller = LocalPoller()
    # The worker that started it may die, and the others of its group go on.
    orphaned = threading.Event()
    with _listening(settings, secret, orphaned, poller, group.open, Announcements(sys.stdout.fileno())):
        while not ended.is_set() and not (orphaned.is_set() and group.deserted):
            poller.serve(POLL_SECONDS)
            group.look(time.monotonic())


@contextmanager
def _listening(
    settings: Settings,
    secret: bytes,
    orphaned: threading.Event,
    poller: LocalPoller,
    open_session: Callable[[Connection], Session | GroupMember],
    parent: Announcements,
) -> Iterator[None]:
    """Say where this server listens, and let peers in: those of its own host at the poller, others in a thread each."""

    def let_in() -> None:
        while True:
            try:
                connection = listener.accept()
            except ConnectionLostError:
                return
            session = open_session(connection)
            if isinstance(connection, StreamConnection) and connection.local:
                poller.open(connection, session)
            else:
                threading.Thread(target=session.serve, name="evenstep-session", daemon=True).start()

    with listen(settings.listen, settings.port, secret=secret) as listener:
        parent.tell({"addresses": listener.addresses})
        beating = (threading.Event(), settings.heartbeat_seconds)
        threading.Thread(target=parent.beat_until, args=beating, name="evenstep-beat", daemon=True).start()
        threading.Thread(target=let_in, name="evenstep-door", daemon=True).start()
        threading.Thread(target=_watch_input, args=(orphaned,), name="evenstep-input", daemon=True).start()
        yield


def _primary(
    settings: Settings,
    secret: bytes,
    shard_state: ShardState,
    snapshots: Snapshots,
    recorder: JsonlRecorder,
    parent: Announcements | Host,
) -> Primary:
    """What decides, with its connections to the other shards."""
    followers = [connect(addresses, secret=secret) for addresses in settings.shards]
    for follower in followers:
        follower.send({"op": "follow"})
    return Primary(
        shard_state=shard_state,
        workers=settings.workers,
        followers=followers,
        snapshots=snapshots,
        resume=settings.resume,
        snapshot_seconds=settings.snapshot_seconds,
        heartbeat_seconds=settings.heartbeat_seconds,
        recorder=recorder,
        first_incarnation=secrets.randbits(48),
        clock=time.monotonic,
        say=say,
        report=parent.tell,
        name_lost=settings.name_lost,
        drained=parent.drained if isinstance(parent, Host) else dict,
    )


@final
class _Service:
    """What the connections of one server have in common."""

    def __init__(
        self,
        settings: Settings,
        shard_state: ShardState,
        primary: Primary | None,
        recorder: JsonlRecorder,
        host: Host | None,
    ) -> None:
        self._settings = settings
        self._host = host
        self._recorder = recorder
        self._shard_state = shard_state
        self._primary = primary
        self._rendezvous = Rendezvous(settings.workers)
        # Pushes that come as one are taken in as one, by sessions of their own.
        self._lock = threading.RLock()

    def open(self, connection: Connection) -> Session:
        """A session for this connection."""
        return Session(
            connection,
            shard_state=self._shard_state,
            primary=self._primary,
            rendezvous=self._rendezvous,
            lock=self._lock,
            workers=self._settings.workers,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            recorder=self._recorder,
        )

    def run(self, ended: threading.Event, poller: LocalPoller) -> None:
        """Serve until told to end, and put away what is to stay."""
        while not ended.is_set():
            poller.serve(POLL_SECONDS)
            if self._primary is not None:
                with self._lock:
                    self._primary.look()
            if self._host is not None:
                self._host.look()
        # Shard 0 may still have a last snapshot to ask of the others.
        late = time.monotonic() + LAST_SECONDS
        while self._shard_state.led and time.monotonic() < late:
            poller.serve(POLL_SECONDS)
        # Held until the process ends: a worker that asks now has to ask the server that replaces this one.
        self._lock.acquire()
        if self._primary is not None:
            self._primary.finish()


def _watch_input(orphaned: threading.Event) -> None:
    """Whoever started this server holds the other end: when it closes, there is no such process any more."""
    with suppress(OSError):  # A socket in the place of a pipe says so where beats were not read.
        while os.read(sys.stdin.fileno(), 4096):
            pass
    orphaned.set()


def _warm_up() -> None:
    """What torch imports with the first optimizer takes a second or two, which workers need to come up as well."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # At once: threads that still wait for peers hold nothing that must be put away, and would be torn down under torch.
    os._exit(code)

"""The server program, `python -m evenstep.server.program ARGUMENTS`, which `launch.servers` starts.

It writes one line with its addresses to its output, and serves until its input closes or a signal tells it to end.
"""

import os
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Follow
from evenstep.schemes import import_recipes
from evenstep.server.announce import Announcements
from evenstep.server.group.group import ServedGroup
from evenstep.server.group.member import GroupMember
from evenstep.server.host import HostProcess
from evenstep.server.local_poller import LocalPoller
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.requests import Service
from evenstep.server.serving import BrokenServerError, serve_all
from evenstep.server.session import ServerSession
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import JsonlRecorder
from evenstep.telemetry.say import say
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen
from evenstep.transport.stream import StreamConnection

POLL_SECONDS: Final = 0.25
"""How often to check for silent workers and due snapshots."""
LAST_SECONDS: Final = 10.0
"""How long the other servers wait for a last snapshot of shard 0 when all have to end."""


def main(arguments: Sequence[str]) -> int:
    """Run a server; return the exit code."""
    settings = ServerSettings.decode(arguments[0])
    # One thread of this process computes at a time, so a pool for each would only slow it down.
    torch.set_num_threads(1)
    _leave_out_compiler()
    ended, asked = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        asked.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    try:
        # Only modules that the starting process has imported itself, so that no peer can name a module to import.
        for module, folder in settings.recipes:
            import_recipes(module, folder)
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


def serve(settings: ServerSettings, secret: bytes, ended: threading.Event) -> None:
    """Listen, and serve until `ended` is set."""
    if settings.parent:
        _serve_group(settings, secret, ended)
        return
    shard_state = ShardState(settings)
    recorder = JsonlRecorder(settings.snapshots.parent, settings.index, role="server")
    # A server that is restarted on its port may have died before the first snapshot.
    starts = settings.resume and settings.index == settings.port == 0
    if starts and shard_state.snapshots.latest(lambda _: None) is None:
        raise ConfigError(
            f"no snapshot in {settings.snapshots} is complete on this host: resume where the servers were, with the"
            " --run-dir of that run"
        )
    parent = Announcements(sys.stdout.fileno())
    host = HostProcess(settings.host, settings.workers) if settings.host and settings.index == 0 else None
    primary = _primary(shard_state, secret, recorder, host or parent) if settings.index == 0 else None
    service = Service(
        shard_state=shard_state,
        primary=primary,
        rendezvous=Rendezvous(settings.workers),
        lock=threading.RLock(),
        recorder=recorder,
    )
    poller = LocalPoller()

    def present() -> Mapping[str, object]:
        with service.lock:
            return {"here": bool(shard_state.slots), **({} if host is None else host.absent)}

    questions = partial(parent.answer, sys.stdin.fileno(), present, ended)
    with _listening(settings, secret, parent, questions, poller, partial(ServerSession, service=service)):
        _run(service, host, ended, poller)
        shard_state.snapshots.wait()
    recorder.close()


def _serve_group(settings: ServerSettings, secret: bytes, ended: threading.Event) -> None:
    """Like `serve`, for a group server."""
    group = ServedGroup(
        workers=settings.workers,
        connect=lambda: connect(settings.parent, secret=secret),
        patience_seconds=settings.heartbeat_seconds,
    )
    poller = LocalPoller()
    # If the worker that started it dies, the others of its group continue.
    orphaned = threading.Event()
    parent = Announcements(sys.stdout.fileno())
    questions = partial(parent.answer, sys.stdin.fileno(), lambda: {"here": not group.deserted}, orphaned)
    with _listening(settings, secret, parent, questions, poller, group.open):
        while not ended.is_set() and not (orphaned.is_set() and group.deserted):
            poller.serve(POLL_SECONDS)
            group.look(time.monotonic())


@contextmanager
def _listening(
    settings: ServerSettings,
    secret: bytes,
    parent: Announcements,
    questions: Callable[[], None],
    poller: LocalPoller,
    open_session: Callable[[Connection], ServerSession | GroupMember],
) -> Iterator[None]:
    """Report the addresses and accept connections: on this host for the poller, others with a thread each."""

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
                threading.Thread(target=serve_all, args=(session,), name="evenstep-session", daemon=True).start()

    with listen(settings.listen, settings.port, secret=secret) as listener:
        parent.tell({"addresses": listener.addresses})
        beating = (settings.heartbeat_seconds,)
        threading.Thread(target=parent.write, args=beating, name="evenstep-beat", daemon=True).start()
        threading.Thread(target=let_in, name="evenstep-door", daemon=True).start()
        threading.Thread(target=questions, name="evenstep-input", daemon=True).start()
        yield


def _primary(
    shard_state: ShardState, secret: bytes, recorder: JsonlRecorder, parent: Announcements | HostProcess
) -> Primary:
    """Make the primary, and connect it to the other shards."""
    followers = [connect(addresses, secret=secret) for addresses in shard_state.settings.shards]
    for follower in followers:
        follower.send(encode(Follow()))
    return Primary(
        shard_state=shard_state,
        followers=followers,
        recorder=recorder,
        first_incarnation=secrets.randbits(48),
        clock=time.monotonic,
        say=say,
        report=parent.tell,
    )


def _run(service: Service, host: HostProcess | None, ended: threading.Event, poller: LocalPoller) -> None:
    """Serve until `ended` is set, then save the run."""
    while not ended.is_set():
        poller.serve(POLL_SECONDS)
        if service.primary is not None:
            with service.lock:
                service.primary.look()
                if host is not None:
                    host.look()
    # Shard 0 may still ask the other servers for a last snapshot.
    late = time.monotonic() + LAST_SECONDS
    while service.shard_state.led and time.monotonic() < late:
        poller.serve(POLL_SECONDS)
    # Held until the process ends: later requests must reach the server that replaces this one.
    service.lock.__enter__()
    if host is not None:
        host.look()
    if service.primary is not None:
        service.primary.finish()


def _leave_out_compiler() -> None:
    """Keep optimizers from importing torch's compiler, which takes 70 MB and as long as importing torch."""
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            # Where torch.compiler.disable keeps what it made of a method (torch 2.13); elsewhere this has no effect.
            plain.__dynamo_disable = plain


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # No cleanup: threads that still wait for peers would be torn down inside torch.
    os._exit(code)

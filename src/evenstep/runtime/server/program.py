"""The server program, `python -m evenstep.runtime.server.program SETTINGS`, which `runtime.server.process` starts.

It listens, says where in one line on its output, and serves until its input closes or it is told to end.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import torch

from evenstep.core.errors import EvenstepError
from evenstep.runtime.server.desk import Desk
from evenstep.runtime.server.head import Head
from evenstep.runtime.server.meeting import Meeting
from evenstep.runtime.server.replica import Replica
from evenstep.runtime.server.session import Session
from evenstep.runtime.server.snapshots import Snapshots
from evenstep.telemetry import JsonlRecorder
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen
from evenstep.transport.stream import StreamConnection

SECRET_VARIABLE: Final = "EVENSTEP_SECRET"

LOOK_SECONDS: Final = 0.25
"""How often a server looks who is silent and what is due."""
LAST_SECONDS: Final = 10.0
"""How long the other servers wait for what shard 0 still asks of them, when all are to end."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is told, as JSON; see `evenstep.runtime.server.process.ServerSettings`."""

    index: int
    count: int
    workers: int
    snapshots: str
    listen: str = "127.0.0.1"
    port: int = 0
    resume: bool = False
    allow: tuple[str, ...] = ()
    shards: tuple[tuple[str, ...], ...] = ()
    snapshot_seconds: float = 60.0
    heartbeat_seconds: float = 20.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the argument."""
        record: Mapping[str, Any] = json.loads(text)
        shards = tuple(tuple(addresses) for addresses in record.get("shards", ()))
        return cls(**{**record, "allow": tuple(record.get("allow", ())), "shards": shards})


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end."""
    settings = Settings.parse(arguments[0])
    # One thread of this process computes at a time; a pool for each would only be in the way.
    torch.set_num_threads(1)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    try:
        serve(settings, secret, ended)
    except EvenstepError as error:
        print(f"evenstep: server {settings.index}: {error}", file=sys.stderr)
        return 1
    return 0


def serve(settings: Settings, secret: bytes, ended: threading.Event) -> None:
    """Listen, and serve until `ended` is set."""
    snapshots = Snapshots(Path(settings.snapshots), settings.count)
    replica = Replica(index=settings.index, count=settings.count, snapshots=snapshots, allow=settings.allow)
    recorder = JsonlRecorder(Path(settings.snapshots).parent, settings.index, role="server")
    head = None
    if settings.index == 0:
        followers = [connect(addresses, secret=secret) for addresses in settings.shards]
        for follower in followers:
            follower.send({"op": "follow"})
        head = Head(
            replica=replica,
            workers=settings.workers,
            followers=followers,
            snapshots=snapshots,
            resume=settings.resume,
            snapshot_seconds=settings.snapshot_seconds,
            heartbeat_seconds=settings.heartbeat_seconds,
            recorder=recorder,
            clock=time.monotonic,
            say=lambda text: print(f"evenstep: {text}", file=sys.stderr, flush=True),
        )
    lock = threading.Lock()
    desk = Desk()
    meeting = Meeting(settings.workers)
    with listen(settings.listen, settings.port, secret=secret) as listener:
        print(json.dumps({"addresses": listener.addresses}), flush=True)

        def session(connection: Connection) -> Session:
            return Session(
                connection,
                replica=replica,
                head=head,
                meeting=meeting,
                lock=lock,
                workers=settings.workers,
                heartbeat_seconds=settings.heartbeat_seconds,
            )

        def let_in() -> None:
            while True:
                try:
                    connection = listener.accept()
                except ConnectionLostError:
                    return
                if isinstance(connection, StreamConnection) and connection.local:
                    desk.open(connection, session(connection))
                else:
                    serve = session(connection).serve
                    threading.Thread(target=serve, name="evenstep-session", daemon=True).start()

        def watch_input() -> None:
            # Whoever started this server holds the other end: when it closes, nobody needs the server any more.
            while os.read(sys.stdin.fileno(), 4096):
                pass
            ended.set()

        threading.Thread(target=let_in, name="evenstep-door", daemon=True).start()
        threading.Thread(target=watch_input, name="evenstep-input", daemon=True).start()
        threading.Thread(target=_warm_up, name="evenstep-warm-up", daemon=True).start()
        while not ended.is_set():
            desk.serve(LOOK_SECONDS)
            if head is not None:
                with lock:
                    head.look()
        # Shard 0 may still have a last snapshot to ask of the others.
        late = time.monotonic() + LAST_SECONDS
        while replica.led and time.monotonic() < late:
            desk.serve(LOOK_SECONDS)
        if head is not None:
            with lock:
                head.finish()
        snapshots.wait()
    recorder.close()


def _warm_up() -> None:
    """What torch imports with the first optimizer takes a second or two, which workers need to come up as well."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # At once: threads that still wait for peers hold nothing that must be put away, and would be torn down under torch.
    os._exit(code)

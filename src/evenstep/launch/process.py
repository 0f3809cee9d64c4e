"""Starts, watches and ends the server processes of one run.

It knows how a server is started and told from a dead one, not what servers do. A server ends by itself when its
standard input closes, so none outlives the process that started it, however that ends.
"""

import json
import os
import secrets
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeAlias, final
from urllib.parse import urlsplit

from evenstep.core.coordinate import Heartbeats
from evenstep.core.errors import ConfigError
from evenstep.launch.keeper import how_it_ended

SECRET_VARIABLE: Final = "EVENSTEP_SECRET"
"""What servers and workers know each other by, in hexadecimal; in the environment only, never among arguments."""

GONE_SECONDS: Final = 5.0
"""How long a server whose output has closed may take to be gone."""
POLL_SECONDS: Final = 0.5
"""How often to look whether the main thread has ended."""
HURRY_SECONDS: Final = 0.1
"""How soon ending notices that it is to be quick."""
CLOSE_SECONDS: Final = 0.01
"""How soon closing notices that all have ended, or that it was interrupted."""

SERVER_COMMAND: Final = (sys.executable, "-m", "evenstep.server.program")

Record: TypeAlias = Callable[[Mapping[str, object]], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the servers of a run are told.

    Attributes:
        count: Servers, which is shards; 1 or more.
        workers: Workers of the run.
        snapshots: Where they write their snapshots, and find them.
        scratch: A folder that belongs to this run alone: servers remove it where the process that started them, which
            should, was killed.
        listen: The host name or address that they listen on.
        resume: Whether they continue from the last snapshot.
        allow: Further optimizers that they may run, by name.
        restarts: How often all of them are started again after one died.
        start_seconds: How long a server may take until it listens.
        heartbeat_seconds: How long a worker or a server may be silent before it is given up.
        end_seconds: How long a server may take to end, its last snapshot included, before it is killed.
        command: The server program, to which its settings are added as JSON.
        secret: What peers know each other by, in hexadecimal; None draws one.
        parent: For the server of a group, where its parent can be reached; empty for a parent's own.
        name: What it is called in messages, for the server of a group.
        until_closed: They stay beyond the main thread's end, as others than this process use them; whoever started them
            closes them.
        name_lost: Their summary names lost workers; else the process that started them does.
    """

    count: int
    workers: int
    snapshots: Path
    scratch: Path | None = None
    listen: str = "127.0.0.1"
    resume: bool = False
    allow: tuple[str, ...] = ()
    restarts: int = 3
    start_seconds: float = 300.0
    heartbeat_seconds: float = 20.0
    end_seconds: float = 60.0
    command: tuple[str, ...] = SERVER_COMMAND
    secret: str | None = None
    parent: tuple[str, ...] = ()
    name: str = ""
    until_closed: bool = False
    name_lost: bool = True


def start_servers(settings: ServerSettings, record: Record, told: Record | None = None) -> "Servers":
    """Start the servers of a run and wait until all of them listen.

    Args:
        settings: What they are told.
        record: Is given what happens to them later, from another thread, as events that have the `server` and a
            sentence `text`: `servers_restarted`, `servers_lost`, and `server_failed` for one that did not end well.
        told: Is given the events `join` and `leave` of workers, as shard 0 tells them, from another thread.

    Raises:
        ConfigError: One ended, or did not listen in time; none is left running.
    """
    return Servers(settings, record, told)


@final
class Servers:
    """The running servers of one run, watched by a thread that starts all of them again when one dies.

    All, because shards must be at one version: they go back to the last snapshot that they have in common. The others
    are killed, so that none writes a later one. They keep their ports. Servers that nobody closed end with the main
    thread.

    Attributes:
        secret: What a worker needs to be let in; for the environment variable `EVENSTEP_SECRET`.
        addresses: Those of shard 0, of shard 1, ..., best first.
    """

    def __init__(self, settings: ServerSettings, record: Record, told: Record | None = None) -> None:
        self.secret = settings.secret or secrets.token_hex(32)
        self._settings = settings
        self._record = record
        self._told = told
        self._heartbeats = Heartbeats(settings.heartbeat_seconds)
        self._looked = time.monotonic()
        self._environment = {**os.environ, SECRET_VARIABLE: self.secret}
        self._servers: list[_Server] = []
        self._lost: str | None = None
        self._abandoned = False
        self._wake, self._waker = os.pipe()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        try:
            self._require_started(self._start(resume=settings.resume, ports=[0] * settings.count))
        except BaseException:
            self._kill_all()
            self._close_pipe()
            raise
        self.addresses = tuple(server.addresses for server in self._servers)
        self._ports = [server.port for server in self._servers]
        self._thread = threading.Thread(target=self._watch, name="evenstep-servers")
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why there are no servers any more, as a sentence; None while there are, or where they were closed."""
        return self._lost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the servers, gently first, and wait for that; who interrupts the wait has them killed."""
        if self._wake < 0:
            return
        try:
            os.write(self._waker, b"x")
            self._await_end()
        except BaseException:
            self._hurry.set()
            self._await_end()
            raise
        finally:
            self._thread.join()
            self._close_pipe()

    def abandon(self) -> None:
        """Let them go on without anybody who watches over them; those of a group end by themselves."""
        self._abandoned = True
        self.close()

    def _await_end(self) -> None:
        # In short sleeps, since a signal that comes just before a wait is not noticed until the wait is over. Neither
        # the event's wait, which an interrupt can leave with the event's lock held, nor a join: a thread whose join was
        # interrupted counts as ended (bpo-45274), though it is not.
        while not self._ended.is_set():
            time.sleep(CLOSE_SECONDS)

    def _close_pipe(self) -> None:
        os.close(self._wake)
        os.close(self._waker)
        self._wake = self._waker = -1

    def _require_started(self, death: "_Death | None") -> None:
        if death is not None:
            raise ConfigError(f"{death.how}, before any worker was started: its output above tells why")

    def _start(self, *, resume: bool, ports: Sequence[int]) -> "_Death | None":
        """Start all, shard 0 last, since it is told where the others listen; whoever died of it, if any."""
        for server in self._servers:
            self._heartbeats.forget(server.index)
        self._servers = []
        for index in range(1, self._settings.count):
            self._launch({"index": index, "port": ports[index], "resume": resume})
        death = self._await_all()
        if death is not None:
            return death
        shards = [server.addresses for server in self._servers]
        self._launch({"index": 0, "port": ports[0], "resume": resume, "shards": shards})
        self._servers.sort(key=lambda server: server.index)
        return self._await_all()

    def _launch(self, own: Mapping[str, object]) -> None:
        settings = self._settings
        argument = {
            **own,
            "count": settings.count,
            "workers": settings.workers,
            "listen": settings.listen,
            "snapshots": str(settings.snapshots),
            "scratch": str(settings.scratch or ""),
            "host": os.getpid() if settings.until_closed else 0,
            "allow": settings.allow,
            "parent": settings.parent,
            "heartbeat_seconds": settings.heartbeat_seconds,
            "name_lost": settings.name_lost,
        }
        self._servers.append(
            _Server(int(str(own["index"])), (*settings.command, json.dumps(argument)), self._environment)
        )

    def _await_all(self) -> "_Death | None":
        """Wait until all that were started listen, unless one dies before."""
        deadline = time.monotonic() + self._settings.start_seconds
        while any(not server.addresses for server in self._servers):
            death = self._look(deadline)
            if death is not None:
                return death
        return None

    def _look(self, deadline: float | None = None) -> "_Death | None":
        """Wait a little for a server to say something, to end, or to be late; whoever ended or is late, if any.

        Raises:
            _ClosingError: The servers are to end.
        """
        timeout = min(POLL_SECONDS, self._settings.heartbeat_seconds / 4)
        if deadline is not None:
            timeout = min(timeout, max(0.0, deadline - time.monotonic()))
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for server in self._servers:
                selector.register(server.output, selectors.EVENT_READ, data=server)
            ready = [key.data for key, _ in selector.select(timeout)]
        # A training script has no place where it would close what `prepare` opened.
        if None in ready or not (self._settings.until_closed or threading.main_thread().is_alive()):
            raise _ClosingError
        self._notice_own_absence()
        for server in ready:
            if not server.read():
                return _Death(server=server.index, how=f"{self._name(server.index)} {server.how_it_ended()}")
            self._take_in(server)
        for silent in self._heartbeats.silent(self._looked):
            how = f"{self._name(silent)} was silent for {self._settings.heartbeat_seconds:g} s"
            return _Death(server=silent, how=how)
        if ready or deadline is None or time.monotonic() < deadline:
            return None
        late = next(server.index for server in self._servers if not server.addresses)
        how = f"{self._name(late)} did not listen within {self._settings.start_seconds:g} s"
        return _Death(server=late, how=how)

    def _take_in(self, server: "_Server") -> None:
        if server.beats:
            self._heartbeats.heard(server.index, self._looked)
        for event in server.take_events():
            if self._told is not None:
                self._told(event)

    def _notice_own_absence(self) -> None:
        """Where this process stood still itself, no server's silence until now means anything."""
        now = time.monotonic()
        if now - self._looked > self._settings.heartbeat_seconds / 2:
            self._heartbeats.hear_all(now)
        self._looked = now

    def _name(self, server: int) -> str:
        return self._settings.name or f"server {server}"

    def _watch(self) -> None:
        """The thread: start all again while that is allowed, and end them in the end."""
        restarts, limit = 0, self._settings.restarts
        death: _Death | None = None
        try:
            while True:
                if death is None:
                    death = self._look()
                    continue
                self._kill_all()
                if restarts == limit:
                    self._give_up(death, f"{death.how}; no restart is left of {limit}")
                    return
                restarts += 1
                again = "it starts again" if self._settings.parent else "all start again from their last snapshot"
                text = f"{death.how}; {again} ({restarts} of {limit})"
                self._record({"event": "servers_restarted", "server": death.server, "restart": restarts, "text": text})
                death = self._start(resume=True, ports=self._ports)
        except _ClosingError:
            if self._abandoned:
                self._let_go()
            else:
                self._end_all()
        except OSError as error:
            self._give_up(death, f"the servers could not be started again ({error})")
        finally:
            self._kill_all()
            self._ended.set()

    def _give_up(self, death: "_Death | None", why: str) -> None:
        self._lost = why
        self._record({"event": "servers_lost", "server": None if death is None else death.server, "text": why})

    def _end_all(self) -> None:
        """End shard 0 before the others, which its last snapshot needs."""
        deadline = time.monotonic() + self._settings.end_seconds
        for group in (self._servers[:1], self._servers[1:]):
            for server in group:
                server.ask_to_end()
            for server in group:
                self._see_ended(server, deadline)

    def _let_go(self) -> None:
        while self._servers:
            self._servers.pop().let_go()

    def _see_ended(self, server: "_Server", deadline: float) -> None:
        # In short waits, so that whoever is in a hurry is heard.
        while not server.has_ended(HURRY_SECONDS) and time.monotonic() < deadline and not self._hurry.is_set():
            pass
        server.kill()
        if server.exit_code != 0:
            lost = "" if self._settings.parent else ": its last snapshot is missing"
            text = f"{self._name(server.index)} {server.how_it_ended()} when it was to end{lost}"
            self._record({"event": "server_failed", "server": server.index, "text": text})

    def _kill_all(self) -> None:
        for server in self._servers:
            server.kill()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    server: int
    how: str


class _ClosingError(Exception):
    """The servers are to end."""


@final
class _Server:
    """One server process."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.index = index
        self.addresses: tuple[str, ...] = ()
        """Where it listens; empty until it does."""
        self.beats = False
        """Whether it has told that it lives, which it does again and again from then on."""
        self._said = b""
        self._events: list[Mapping[str, object]] = []
        # A process group of its own: Ctrl-C at the terminal is for the workers first. Its stderr is ours.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment, process_group=0
        )

    @property
    def output(self) -> IO[bytes]:
        """What it writes; readable when `read` will not wait."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def port(self) -> int:
        """The port that it listens on; 0 where it listens on none."""
        ports = [urlsplit(address).port for address in self.addresses if address.startswith("tcp://")]
        return next(filter(None, ports), 0)

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.poll()

    def read(self) -> bool:
        """Take in what it wrote; False when it has ended or makes no sense, and is gone."""
        piece = os.read(self.output.fileno(), 65536)
        *lines, self._said = (self._said + piece).split(b"\n")
        if lines and not self.addresses:
            try:
                self.addresses = tuple(map(str, json.loads(lines.pop(0))["addresses"]))
            except (ValueError, KeyError, TypeError):
                return not self._gone()
        self._take_in(lines)
        return bool(piece) or not self._gone()

    def _take_in(self, lines: Sequence[bytes]) -> None:
        """Events, and empty lines while it lives; what else is printed in its process is no matter."""
        for line in lines:
            self.beats = self.beats or not line
            with suppress(ValueError):
                event = json.loads(line) if line else None
                if isinstance(event, dict):
                    self._events.append(event)

    def take_events(self) -> list[Mapping[str, object]]:
        """What it has told since the last call."""
        events, self._events = self._events, []
        return events

    def how_it_ended(self) -> str:
        """The rest of a sentence that begins with the server."""
        return how_it_ended(self._process.wait(), "")

    def ask_to_end(self) -> None:
        """Have it write its last snapshot and end."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def let_go(self) -> None:
        """It learns that nobody watches over it any more."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def has_ended(self, seconds: float) -> bool:
        """Whether it has ended, or does within this time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code is not None

    def kill(self) -> None:
        """End it at once, whatever it does, and let go of it; doing so twice is fine."""
        self._process.kill()
        self._process.wait()
        self.let_go()

    def _gone(self) -> bool:
        """It has closed its output, or talks nonsense: give it a moment to end by itself."""
        if not self.has_ended(GONE_SECONDS):
            self._process.kill()
            self._process.wait()
        return True

"""Starts, watches and ends the server processes of a run.

A server ends when its standard input closes, so none outlives the process that started it, however that ends.
"""

import os
import secrets
import selectors
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeAlias, final

from msgspec import structs

from evenstep.core.coordinate import Presence
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.launch.server_process import ServerProcess
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings, read_secret
from evenstep.launch.supervisor import END_SECONDS
from evenstep.schemes import Scheme, parse_scheme, recipe_modules
from evenstep.telemetry.events import ServerFailed, ServersLost, ServersRestarted
from evenstep.telemetry.recorder import writing_to
from evenstep.telemetry.say import say

POLL_SECONDS: Final = 0.1
"""How often to check whether the servers are to end, and then whether they have ended, or are to be killed."""

Record: TypeAlias = Callable[[ServersRestarted | ServersLost | ServerFailed], None]
Told: TypeAlias = Callable[[Mapping[str, object]], None]


@final
class Servers:
    """The running servers of one run. A thread watches them and restarts all when one dies.

    All, because shards must be at one version: they go back to the last snapshot that they have in common. The others
    are killed, so that none writes a later one. Servers keep their ports. They end with the main thread if they are
    not closed earlier.

    Args:
        settings: The settings of the servers.
        record: Receives later events, from another thread: `servers_restarted`, `servers_lost`, and `server_failed` for
            a server that did not end well. Each has the `server` and a sentence `text`.
        told: Receives what shard 0 reports of workers that come and go, from another thread.

    Attributes:
        secret: The secret with which a worker is let in; for the environment variable `EVENSTEP_SECRET`.
        addresses: The addresses of shard 0, of shard 1, ..., best first.
        lost: Why there are no servers any more, as a sentence; None while they run, or after they were closed.

    Raises:
        ConfigError: A server ended, or did not listen in time; none is left running.
    """

    def __init__(self, settings: ServerSettings, record: Record, told: Told = lambda event: None) -> None:
        self.secret = settings.secret or secrets.token_hex(32)
        self.lost: str | None = None
        self._settings = settings
        self._record = record
        self._told = told
        self._environment = {**os.environ, SECRET_VARIABLE: self.secret}
        self._servers: list[ServerProcess] = []
        self._abandoned = False
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        try:
            self._start(resume=settings.resume, ports=[0] * settings.count)
        except BaseException as error:
            self._kill_all()
            if not isinstance(error, _ServerLostError):
                raise
            raise ConfigError(f"{error.how}, before any worker was started: its output above tells why") from None
        self.addresses = tuple(server.addresses for server in self._servers)
        self._ports = [server.port for server in self._servers]
        self._thread = threading.Thread(target=self._watch, name="evenstep-servers")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers, gently first, and wait for that; after an interrupt of the wait only for a few seconds.

        An interrupt may come twice at once, and the servers have a snapshot to write.
        """
        self._closing.set()
        try:
            self._await_end()
        except BaseException:
            self._hurry.set()
            self._await_end()
            raise
        finally:
            self._thread.join()

    def ask_for_present(self) -> None:
        """Have shard 0 report an event `present`, which says whether any worker is there; lost if it restarts."""
        for server in tuple(self._servers):
            if server.index == 0:
                server.ask_for_present()

    def abandon(self) -> None:
        """Leave the servers running without supervision; those of a group end by themselves."""
        self._abandoned = True
        self.close()

    def _await_end(self) -> None:
        # In short sleeps: a signal just before a wait is noticed only after it. An interrupted wait for the event may
        # leave its lock held, and a thread whose join was interrupted counts as ended (bpo-45274).
        while not self._ended.is_set():
            time.sleep(0.01)

    def _start(self, *, resume: bool, ports: Sequence[int]) -> None:
        """Start all servers; shard 0 comes last, since it is told where the others listen."""
        self._presence, self._servers = Presence(self._settings.heartbeat_seconds), []
        for index in range(1, self._settings.count):
            self._launch(index, port=ports[index], resume=resume)
        self._await_all()
        shards = tuple(server.addresses for server in self._servers)
        self._launch(0, port=ports[0], resume=resume, shards=shards)
        self._servers.sort(key=lambda server: server.index)
        self._await_all()

    def _launch(self, index: int, *, port: int, resume: bool, shards: tuple[tuple[str, ...], ...] = ()) -> None:
        settings = structs.replace(
            self._settings,
            resume=resume,
            index=index,
            port=port,
            shards=shards,
            host=os.getpid() if self._settings.until_closed else 0,
            recipes=tuple(recipe_modules(self._settings.allow)),
        )
        self._servers.append(ServerProcess(index, (*settings.command, settings.encode()), self._environment))

    def _await_all(self) -> None:
        """Wait until all servers that were started listen."""
        deadline = time.monotonic() + self._settings.start_seconds
        while any(not server.addresses for server in self._servers):
            self._look(deadline)

    def _look(self, deadline: float | None = None) -> None:
        """Wait a little for a server to report something; all must listen before the deadline, if there is one."""
        timeout = min(POLL_SECONDS, self._settings.heartbeat_seconds / 4)
        if deadline is not None:
            timeout = min(timeout, max(0.0, deadline - time.monotonic()))
        with selectors.DefaultSelector() as selector:
            for server in self._servers:
                selector.register(server.output, selectors.EVENT_READ, data=server)
            ready: list[ServerProcess] = [key.data for key, _ in selector.select(timeout)]
        # A training script has no place where it would close what `prepare` opened.
        if self._closing.is_set() or not (self._settings.until_closed or threading.main_thread().is_alive()):
            raise _ClosingError
        now = time.monotonic()
        for server in ready:
            self._take_in(server, now)
        for lost in self._presence.look(now):
            raise self._loss(lost.worker, f"was silent for {lost.seconds:g} s")
        if not ready and deadline is not None and time.monotonic() >= deadline:
            late = next(server.index for server in self._servers if not server.addresses)
            raise self._loss(late, f"did not listen within {self._settings.start_seconds:g} s")

    def _take_in(self, server: ServerProcess, now: float) -> None:
        events = server.read()
        if events is None:
            raise self._loss(server.index, server.how_it_ended)
        if server.beats:
            self._presence.expect(server.index, now)
        for event in events:
            self._told(event)

    def _name(self, server: int) -> str:
        return self._settings.name or f"server {server}"

    def _loss(self, server: int, how: str) -> "_ServerLostError":
        return _ServerLostError(server, f"{self._name(server)} {how}")

    def _watch(self) -> None:
        """Restart all servers while that is allowed, and end them. Runs in the thread."""
        limit, dead = self._settings.restarts, None
        try:
            lost = self._await_loss(start=False)
            for restart in range(1, limit + 1):
                dead = lost.server
                again = "it starts again" if self._settings.parent else "all start again from their last snapshot"
                text = f"{lost.how}; {again} ({restart} of {limit})"
                self._kill_all()
                self._record(ServersRestarted(server=dead, restart=restart, text=text))
                lost = self._await_loss(start=True)
            self._kill_all()
            self._give_up(lost.server, f"{lost.how}; no restart is left of {limit}")
        except _ClosingError:
            if not self._abandoned:
                self._end_all()
            while self._servers:
                self._servers.pop().let_go()
        except OSError as error:
            self._give_up(dead, f"the servers could not be started again ({error})")
        finally:
            self._kill_all()
            self._ended.set()

    def _await_loss(self, *, start: bool) -> "_ServerLostError":
        try:
            if start:
                self._start(resume=True, ports=self._ports)
            while True:
                self._look()
        except _ServerLostError as lost:
            return lost

    def _give_up(self, server: int | None, why: str) -> None:
        self.lost = why
        self._record(ServersLost(server=server, text=why))

    def _end_all(self) -> None:
        """End shard 0 before the others, which its last snapshot needs."""
        deadline = time.monotonic() + self._settings.end_seconds
        for group in (self._servers[:1], self._servers[1:]):
            left = max(0.0, deadline - time.monotonic())
            for server in group:
                server.ask_to_end(left)
            for server in group:
                while not server.process.ended_within(POLL_SECONDS):
                    server.process.end(min(left, END_SECONDS) if self._hurry.is_set() else left)
                if server.process.exit_code != 0:
                    lost = "" if self._settings.parent else ": its last snapshot is missing"
                    text = f"{self._name(server.index)} {server.how_it_ended} when it was to end{lost}"
                    self._record(ServerFailed(server=server.index, text=text))

    def _kill_all(self) -> None:
        for server in self._servers:
            server.kill()


def start_servers(
    scheme: Scheme | str,
    *,
    workers: int,
    run_dir: str | os.PathLike[str] | None = None,
    listen: str = "127.0.0.1",
    secret: str | None = None,
    resume: bool = False,
) -> Servers:
    """Start the parameter servers of a run, as children of this process; use it in a `with` statement.

        with evenstep.start_servers("ssp:bound=3", workers=4) as servers:
            ...  # start workers with evenstep.Client(servers=servers.addresses, secret=servers.secret, ...)

    Leave the statement when all workers have ended. Under `evenstep run` the launcher starts the servers. The servers
    need torch; this process and the workers do not.

    Args:
        scheme: A scheme on parameter servers, the same as the workers'.
        workers: The number of workers.
        run_dir: Folder for the servers' events and snapshots.
        listen: The host name or address to listen on. Beyond loopback it needs the extra `evenstep[hosts]`.
        secret: The secret with which workers are let in, 32 or more hexadecimal digits; None draws one.
        resume: Whether to continue from the last snapshot in `run_dir`.

    Raises:
        ConfigError: An argument cannot be used, the scheme needs no servers, or a server could not be started.
    """
    parsed = parse_scheme(scheme)
    if parsed.served is None:
        raise ConfigError(f"the scheme {parsed.name!r} needs no servers: use evenstep.Balancer, or one such as ssp")
    workers = require_whole("workers", workers, 1, UNLIMITED)
    if not isinstance(run_dir, str | os.PathLike | None):
        raise ConfigError(f"run_dir must be the path of a folder, not {shown(run_dir)}")
    if not isinstance(listen, str):
        raise ConfigError(f"listen must be a host name or an address, not {shown(listen)}")
    if not isinstance(resume, bool):
        raise ConfigError(f"resume must be True or False, not {shown(resume)}")
    if secret is not None:
        read_secret(secret)
    scratch = None if run_dir is not None else tempfile.TemporaryDirectory(prefix="evenstep-")
    folder = Path(scratch.name if scratch is not None else run_dir or "")
    snapshots = folder / "snapshots"
    with writing_to(folder):
        snapshots.mkdir(exist_ok=True)
    settings = ServerSettings(
        count=parsed.served.servers,
        allow=parsed.served.allowed,
        workers=workers,
        snapshots=snapshots,
        scratch=None if scratch is None else folder,
        listen=listen,
        secret=secret,
        resume=resume,
    )
    servers = Servers(settings, lambda event: say(event.text))
    if scratch is not None:
        weakref.finalize(servers, scratch.cleanup)
    return servers


class _ServerLostError(Exception):
    """A server died; `how` is a sentence."""

    def __init__(self, server: int, how: str) -> None:
        super().__init__(how)
        self.server = server
        self.how = how


class _ClosingError(Exception):
    """The servers are to end."""

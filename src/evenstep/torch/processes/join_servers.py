"""Finds the servers of a run, or starts them, and joins the other workers there instead of in a process group."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, final

import torch.distributed as dist

from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import PrefixStore, Store
from evenstep.launch.handover import Handover, private_folder, run_of
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.meeting_place import bounded, keeper_of, meet
from evenstep.launch.process import SECRET_VARIABLE, Servers, ServerSettings, start_servers
from evenstep.schemes import Scheme, group_servers
from evenstep.server.shard.snapshots import Snapshots
from evenstep.telemetry.say import say
from evenstep.torch.failure import when_failing
from evenstep.torch.processes.workers import Workers, gather
from evenstep.transport.base import SilentError
from evenstep.transport.connect import connect
from evenstep.worker.activity import Activity
from evenstep.worker.servers.link import Link

if TYPE_CHECKING:
    import tempfile

_KEY: Final = "addresses"
_JOINED: Final = "EVENSTEP_JOINED"
"""The process that has joined the launcher's servers, which serve one run; children inherit it and are others."""
_START_SECONDS: Final = 300.0
"""How long the first worker may take to start the servers, beyond the timeout."""
POLL_SECONDS: Final = 0.2
"""How often to look whether what keeps servers is to end."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This process among the workers of a run on servers, its line to them, and what others need to reach them."""

    workers: Workers
    link: Link
    addresses: tuple[tuple[str, ...], ...]
    secret: str


def join_servers(
    launched: LaunchSettings,
    shards: int,
    timeout_seconds: float,
    run_dir: Path | None,
    activity: Activity,
    asked: Mapping[str, object] = NOTHING_ASKED,
) -> Joined:
    """Join the workers of a run on servers.

    The launcher has started the servers; where it has not (plain torchrun, several nodes, a single process), the first
    worker starts them as its own children, and the others find them through torchrun's store.

    Raises:
        ConfigError: torchrun's environment is incomplete, or the servers could not be started, or serve a run that
            this process was prepared for before, or a worker was `asked` for something wrong.
        DisagreementError: Another worker joins none, or another number of them.
    """
    rank, count = _place(os.environ)
    hosting: _Hosting | None = None
    if launched.servers:
        addresses, secret = launched.servers, os.environ[SECRET_VARIABLE]
    elif count == 1 and not dist.is_initialized():
        hosting = _host(shards, count, "127.0.0.1", run_dir, None, launched)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
    else:
        store = _store(rank, count, timeout_seconds, asked)
        addresses, secret, hosting = bounded(
            lambda: _meet_in_store(store, rank, count, shards, run_dir, launched, timeout_seconds),
            timeout_seconds + (_START_SECONDS if rank == 0 else 0.0),
            keeper_of(store, os.environ),
        )
    if len(addresses) != shards:
        raise ConfigError(
            f"the scheme asks for {shards} servers but {len(addresses)} were started: give the launcher the same scheme"
        )
    if launched.servers:
        _require_first(addresses)
    link = Link(
        rank,
        lambda shard: connect(addresses[shard], secret=bytes.fromhex(secret)),
        shards,
        timeout_seconds=timeout_seconds,
        activity=activity,
    )
    if hosting is not None:
        link.hosting.append(hosting.end)
    workers = Workers(
        rank=rank, count=count, host=socket.gethostname(), timeout_seconds=timeout_seconds, meet=link.meet
    )
    return Joined(workers=workers, link=link, addresses=addresses, secret=secret)


def join_group(joined: Joined, scheme: Scheme, hosts: Sequence[str]) -> None:
    """Have this worker speak to its group's server, where the group has one; its first worker starts that.

    All workers must call it together.

    Raises:
        ConfigError: The server of a group could not be started.
    """
    groups = group_servers(scheme, hosts, root=hosts[0])
    if not groups:
        return
    rank, link = joined.workers.rank, joined.link
    own = next((group for group in groups if rank in group), ())
    record: dict[str, object] = {}
    if own and rank == own[0]:
        try:
            hosting = _host_group(joined, own)
            link.hosting.append(hosting.end)
            record["addresses"] = hosting.servers.addresses[0]
        except ConfigError as error:
            record["error"] = str(error)
    records = gather(joined.workers, record)
    for worker, each in enumerate(records):
        if "error" in each:
            raise ConfigError(f"worker {worker}: {each['error']}")
    if not own:
        return
    addresses = tuple(records[own[0]]["addresses"])
    link.move(lambda _: connect(addresses, secret=bytes.fromhex(joined.secret)))


def _host_group(joined: Joined, group: Sequence[int]) -> "_Hosting":
    """Start the server of this group as a child of this process, which it outlives where the others need it."""
    settings = ServerSettings(
        count=1,
        workers=joined.workers.count,
        snapshots=Path(),  # It keeps none.
        secret=joined.secret,
        parent=joined.addresses[0],
        name=f"the server of {name_workers(list(group))}",
        until_closed=True,
    )
    hosting = _Hosting(start_servers(settings, lambda event: say(str(event["text"]))), outlived=True)
    hosting.start()
    return hosting


def _require_first(addresses: Sequence[Sequence[str]]) -> None:
    """The launcher's servers serve one run.

    Raises:
        ConfigError: This process has joined them before.
    """
    # What a process's children inherit is not theirs.
    joined = f"{os.getpid()} {addresses}"
    if os.environ.get(_JOINED) == joined:
        raise ConfigError(
            "this script calls prepare a second time, but the launcher's servers serve one run: start the script once"
            " for each, or leave the scheme out of evenstep run's options and name it in prepare alone"
        )
    os.environ[_JOINED] = joined


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of workers."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "WORLD_SIZE" not in environment:
        return 0, 1
    if "RANK" not in environment:
        raise ConfigError("WORLD_SIZE is set but RANK is not: start the script with torchrun")
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def _meet_in_store(
    store: Store,
    rank: int,
    count: int,
    shards: int,
    run_dir: Path | None,
    launched: LaunchSettings,
    timeout_seconds: float,
) -> "tuple[tuple[tuple[str, ...], ...], str, _Hosting | None]":
    """The servers' addresses and secret; the first worker starts them and says where.

    On one host it says so in a file, whose name goes over the store. Beyond it the addresses do; the secret, which the
    user has given to all, does not travel.
    """
    store = PrefixStore("evenstep/servers", store)
    # A script that prepares several times meets anew each time.
    key = f"{_KEY}/{store.add(f'prepared/{rank}', 1)}"
    given = os.environ.get(SECRET_VARIABLE)
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(count)
    if not one_host and given is None:
        raise ConfigError(
            f"servers beyond one host need a secret: set {SECRET_VARIABLE} to the same 32 or more hexadecimal digits on"
            " every host"
        )
    if rank == 0:
        host = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", socket.gethostname())
        hosting = _host(shards, count, host, run_dir, given, launched, store=store)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
        told = "\n".join(map(" ".join, addresses))
        if one_host and count > 1:
            handover = Handover(addresses=addresses, secret="" if given else secret, run=run_of(os.environ))
            told = str(handover.write(hosting.scratch))
        store.set(key, told)
        return addresses, secret, hosting
    # A wait of the store's own would end in lines of its library on the terminal.
    ends = time.monotonic() + timeout_seconds
    while not store.check([key]):
        if time.monotonic() > ends:
            raise WorkerLostError(
                f"worker 0 has not started the servers within {timeout_seconds:g} s: look at its output, or give"
                " prepare a longer timeout"
            )
        time.sleep(POLL_SECONDS)
    told = store.get(key).decode(errors="replace")
    if not one_host:
        return tuple(tuple(line.split()) for line in told.split("\n")), cast("str", given), None
    handover = Handover.read(told, run_of(os.environ))
    if store.add(f"{key}/read", 1) == count - 1:
        Path(told).unlink(missing_ok=True)
    secret = handover.secret or given or ""
    if not secret:
        raise ConfigError(f"the first worker was given {SECRET_VARIABLE} and this one was not: set it for all of them")
    return handover.addresses, secret, None


def _store(rank: int, count: int, timeout_seconds: float, asked: Mapping[str, object]) -> Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise ConfigError(f"WORLD_SIZE is set but {' and '.join(missing)} is not: start the script with torchrun")
    return meet(rank, count, timeout_seconds, asked=asked)


def _host(
    shards: int,
    workers: int,
    host: str,
    run_dir: Path | None,
    secret: str | None,
    launched: LaunchSettings,
    *,
    store: Store | None = None,
) -> "_Hosting":
    """Start the servers as children of this process, which ends them when all workers are done with them.

    Raises:
        ConfigError: They could not be started, or the run directory holds another run's snapshots.
    """
    resume = launched.resume
    kept = run_dir is not None and Snapshots(run_dir / "snapshots", shards).latest() is not None
    if restarted(os.environ, kept=kept):
        resume = kept
    if kept and not resume:
        raise ConfigError(
            f"the run directory {run_dir} holds the snapshots of a run already: give another, or go on from them with"
            " evenstep run --resume"
        )
    scratch = private_folder()
    settings = ServerSettings(
        count=shards,
        workers=workers,
        snapshots=(run_dir or Path(scratch.name)) / "snapshots",
        scratch=Path(scratch.name),
        listen=host,
        secret=secret,
        resume=resume,
        heartbeat_seconds=launched.heartbeat_seconds,
        until_closed=True,
    )
    servers = start_servers(settings, lambda event: say(str(event["text"])))
    hosting = _Hosting(servers, scratch, store)
    hosting.start()
    return hosting


def restarted(environment: Mapping[str, str], *, kept: bool) -> bool:
    """Whether torchrun has started all workers again, with the servers among them; says what that comes to."""
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    then = "goes on from the servers' last snapshot" if kept else "begins anew, for lack of a snapshot in a run_dir"
    say(f"the workers were started again, and the run {then}")
    return True


@final
class _Hosting:
    """Keeps the servers until the other workers are done with them, or this script has failed.

    `outlived`: the others go on with them after that, and they end by themselves.
    """

    def __init__(
        self,
        servers: Servers,
        scratch: "tempfile.TemporaryDirectory[str] | None" = None,
        store: Store | None = None,
        *,
        outlived: bool = False,
    ) -> None:
        self.servers = servers
        self._outlived = outlived
        # Which may be this process's own, and must not close before the others have read where the servers are.
        self._store = store
        self._scratch = scratch
        self._failed = threading.Event()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="evenstep-hosting", daemon=False)

    @property
    def scratch(self) -> Path:
        """The folder of what belongs to this run alone."""
        assert self._scratch is not None
        return Path(self._scratch.name)

    def start(self) -> None:
        """Watch over them, in a thread."""
        when_failing(self, _Hosting.fail)
        atexit.register(self._exit)
        # Not a daemon: the process stays until the others are done too.
        self._thread.start()

    def fail(self, error: BaseException) -> BaseException:
        """This script fails with that error."""
        self._failed.set()
        return error

    def end(self) -> None:
        """End them, once all other workers are done, or at once where this script is failing. Twice is fine."""
        if isinstance(sys.exc_info()[1], Exception):
            self._failed.set()
        with self._ending:
            if self._ended.is_set():
                return
            if threading.current_thread() is not self._thread and self._await_others():
                return  # The script goes on, and the thread waits for those that were given up and may come back.
            if self._failed.is_set() and self._outlived:
                self.servers.abandon()
            else:
                self.servers.close()
            if self._scratch is not None:
                self._scratch.cleanup()
            self._ended.set()
            if not self._lost:
                atexit.unregister(self._exit)

    def _keep(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._ended.is_set():
            main.join(POLL_SECONDS)
        while not self._ended.is_set() and self._await_others():
            time.sleep(POLL_SECONDS)
        self.end()

    def _exit(self) -> None:
        """Fail at exit if a worker is lost: the launcher, which also waits for that worker, then ends it."""
        if self._lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _await_others(self) -> bool:
        """Wait until no worker is at the servers; servers that are restarted meanwhile are asked again.

        Returns whether a worker that was given up may still come back, and notes whether one is lost.
        """
        secret = bytes.fromhex(self.servers.secret)
        while self.servers.lost is None and not self._failed.is_set():
            try:
                with closing(connect(self.servers.addresses[0], secret=secret)) as connection:
                    connection.send({"op": "drain", "seq": 0})
                    while not self._failed.is_set():
                        with suppress(SilentError):
                            told = connection.receive(POLL_SECONDS).header
                            self._lost = bool(told.get("lost"))
                            return bool(told.get("awaits"))
            except ConnectionError:
                time.sleep(POLL_SECONDS)
        return False

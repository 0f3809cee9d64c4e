"""Finds the servers of a run, or starts them, and joins the other workers there instead of in a process group."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

import torch.distributed as dist

from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import PrefixStore, Store
from evenstep.launch.handover import Handover, private_folder, run_of
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.meeting_place import bounded, keeper_of, meet
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings
from evenstep.schemes import Scheme, Served, group_servers
from evenstep.server.shard.snapshots import Snapshots
from evenstep.telemetry.say import say
from evenstep.torch.processes.hosting import POLL_SECONDS, Hosting
from evenstep.torch.processes.workers import Workers, gather, place_of
from evenstep.transport.connect import connect
from evenstep.worker.activity import Activity
from evenstep.worker.servers.link import Link

_JOINED: Final = "EVENSTEP_JOINED"
"""Names the process that has joined the launcher's servers, which serve one run. Children inherit it, but differ."""
_START_SECONDS: Final = 300.0
"""How long the first worker may take to start the servers, beyond the timeout."""
_LOOPBACK: Final = "127.0.0.1"

_Addresses: TypeAlias = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This process among the workers of a run on servers, its link to them, and what others need to reach them."""

    workers: Workers
    link: Link
    addresses: _Addresses
    secret: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The servers that a run wants.

    `launched` holds the launcher's options, `timeout_seconds` is how long a worker waits for the others.
    """

    served: Served
    workers: int
    run_dir: Path | None
    launched: LaunchSettings
    timeout_seconds: float


def join_servers(
    launched: LaunchSettings,
    served: Served,
    timeout_seconds: float,
    run_dir: Path | None,
    activity: Activity,
    asked: Mapping[str, object] = NOTHING_ASKED,
) -> Joined:
    """Join the workers of a run on servers.

    If the launcher has not started the servers (plain torchrun, several nodes, a single process), the first worker
    starts them as its children, and the others find them through torchrun's store.

    Raises:
        ConfigError: torchrun's environment is incomplete, the servers could not be started or serve a run for which
            this process was prepared before, or a worker was `asked` for something wrong.
        DisagreementError: Another worker joins no servers, or another number of them.
    """
    rank, count = place_of()
    wanted = Wanted(served=served, workers=count, run_dir=run_dir, launched=launched, timeout_seconds=timeout_seconds)
    hosting: Hosting | None = None
    if launched.servers:
        addresses, secret = launched.servers, os.environ[SECRET_VARIABLE]
    elif count == 1 and not dist.is_initialized():
        hosting = _host(wanted, _LOOPBACK, None, None)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
    else:
        place_of("MASTER_ADDR", "MASTER_PORT")
        store, _ = meet(rank, count, timeout_seconds, asked=asked)
        addresses, secret, hosting = bounded(
            lambda: meet_in_store(store, rank, wanted),
            timeout_seconds + (_START_SECONDS if rank == 0 else 0.0),
            keeper_of(store, os.environ),
        )
    if len(addresses) != served.servers:
        raise ConfigError(
            f"the scheme asks for {served.servers} servers but {len(addresses)} were started: give the launcher the"
            " same scheme"
        )
    if launched.servers:
        _require_first(addresses)
    link = Link(
        rank,
        lambda shard: connect(addresses[shard], secret=bytes.fromhex(secret)),
        served.servers,
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
    """Connect this worker to its group's server, if the group has one, which the group's first worker starts.

    All workers must call this together.

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
        settings = ServerSettings(
            count=1,
            workers=joined.workers.count,
            snapshots=Path(),  # It keeps none.
            secret=joined.secret,
            parent=joined.addresses[0],
            name=f"the server of {name_workers(list(own))}",
            until_closed=True,
        )
        try:
            hosting = Hosting(settings, outlived=True)
            link.hosting.append(hosting.end)
            record["addresses"] = hosting.servers.addresses[0]
        except ConfigError as error:
            record["error"] = str(error)
    records = gather(joined.workers, record)
    for worker, each in enumerate(records):
        if "error" in each:
            raise ConfigError(f"worker {worker}: {each['error']}")
    if own:
        addresses = tuple(records[own[0]]["addresses"])
        link.move(lambda _: connect(addresses, secret=bytes.fromhex(joined.secret)))


def _require_first(addresses: _Addresses) -> None:
    """Refuse a process that has joined the launcher's servers, which serve one run, before."""
    joined = f"{os.getpid()} {addresses}"
    if os.environ.get(_JOINED) == joined:
        raise ConfigError(
            "this script calls prepare a second time, but the launcher's servers serve one run: start the script once"
            " for each, or leave the scheme out of evenstep run's options and name it in prepare alone"
        )
    os.environ[_JOINED] = joined


def meet_in_store(store: Store, rank: int, wanted: Wanted) -> tuple[_Addresses, str, Hosting | None]:
    """The servers' addresses and secret; the first worker starts them and publishes where they are.

    On one host it publishes the name of a file with both. Beyond one host it publishes the addresses; the secret, which
    the user has given to all workers, does not travel.
    """
    store = PrefixStore("evenstep/servers", store)
    # A script that prepares several times uses a new key each time.
    key = f"addresses/{store.add(f'prepared/{rank}', 1)}"
    given = os.environ.get(SECRET_VARIABLE)
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(wanted.workers)
    if not one_host and given is None:
        raise ConfigError(
            f"servers beyond one host need a secret: set {SECRET_VARIABLE} to the same 32 or more hexadecimal digits on"
            " every host"
        )
    kept = -1
    if wanted.launched.resume and wanted.run_dir is not None:  # Of several hosts, it may be one or as many.
        kept = Snapshots(wanted.run_dir / "snapshots", wanted.served.servers).newest
    if rank == 0:
        host = _LOOPBACK if one_host else os.environ.get("MASTER_ADDR", socket.gethostname())
        hosting = _host(wanted, host, given, store)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
        handover = Handover(addresses=addresses, secret="" if given else secret, run=run_of(os.environ))
        store.set(f"{key}/kept", str(kept))
        store.set(key, str(handover.write(hosting.folder)) if one_host else "\n".join(map(" ".join, addresses)))
        return addresses, secret, hosting
    told = _await(store, key, wanted.timeout_seconds)
    theirs = int(store.get(f"{key}/kept")) if kept >= 0 else -1
    if kept > theirs:
        raise ConfigError(
            f"the newest snapshot in {wanted.run_dir} is version {kept} on the host of worker {rank} and version"
            f" {theirs} on that of worker 0, whose servers would go on from it: copy the newer ones there"
        )
    if not one_host:
        assert given is not None
        return tuple(tuple(line.split()) for line in told.split("\n")), given, None
    handover = Handover.read(told, run_of(os.environ))
    if store.add(f"{key}/read", 1) == wanted.workers - 1:
        Path(told).unlink(missing_ok=True)
    secret = handover.secret or given or ""
    if not secret:
        raise ConfigError(f"the first worker was given {SECRET_VARIABLE} and this one was not: set it for all of them")
    return handover.addresses, secret, None


def _await(store: Store, key: str, timeout_seconds: float) -> str:
    """What worker 0 publishes. The store's own wait would end in its library's output on the terminal."""
    ends = time.monotonic() + timeout_seconds
    while not store.check([key]):
        if time.monotonic() > ends:
            raise WorkerLostError(
                f"worker 0 has not started the servers within {timeout_seconds:g} s: look at its output, or give"
                " prepare a longer timeout"
            )
        time.sleep(POLL_SECONDS)
    return store.get(key).decode(errors="replace")


def _host(wanted: Wanted, host: str, secret: str | None, store: Store | None) -> Hosting:
    """Start the servers as children of this process.

    Raises:
        ConfigError: They could not be started, or the run directory holds another run's snapshots.
    """
    run_dir, resume = wanted.run_dir, wanted.launched.resume
    kept = False
    if run_dir is not None:  # The servers say what they leave out.
        kept = Snapshots(run_dir / "snapshots", wanted.served.servers).latest(lambda _: None) is not None
    if restarted(os.environ, kept=kept or resume):
        resume = resume or kept
    if kept and not resume:
        raise ConfigError(
            f"the run directory {run_dir} holds the snapshots of a run already: give another, or go on from them with"
            " evenstep run --resume"
        )
    scratch = private_folder()
    folder = Path(scratch.name)
    settings = ServerSettings(
        count=wanted.served.servers,
        allow=wanted.served.allowed,
        workers=wanted.workers,
        snapshots=(run_dir or folder) / "snapshots",
        scratch=folder,
        listen=host,
        secret=secret,
        resume=resume,
        heartbeat_seconds=wanted.launched.heartbeat_seconds,
        until_closed=True,
    )
    try:
        return Hosting(settings, scratch, store)
    except ConfigError:
        scratch.cleanup()
        raise


def restarted(environment: Mapping[str, str], *, kept: bool) -> bool:
    """Whether torchrun has restarted all workers, and the servers with them; reports what follows."""
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    then = "goes on from the servers' last snapshot" if kept else "starts over, for lack of a snapshot in a run_dir"
    say(f"the workers were started again, and the run {then}")
    return True

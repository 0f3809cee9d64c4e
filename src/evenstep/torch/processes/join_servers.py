"""Finds or starts the servers of a run, and joins the other workers there instead of in a process group."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

import torch.distributed as dist
from msgspec.structs import replace

from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import PrefixStore, Store
from evenstep.launch.handover import Handover, private_folder, run_of
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings
from evenstep.schemes import Scheme, Served, group_servers
from evenstep.server.shard.snapshots import Snapshots
from evenstep.telemetry.say import say
from evenstep.torch.processes.hosting import POLL_SECONDS, Hosting
from evenstep.torch.processes.meeting_place import meet
from evenstep.torch.processes.store_line import bounded, keeper_of
from evenstep.torch.processes.workers import Workers, gather, place_of
from evenstep.transport.connect import connect
from evenstep.worker.activity import Activity
from evenstep.worker.servers.link import ServerLink

_JOINED: Final = "EVENSTEP_JOINED"
"""Holds the id of the process that joined the launcher's servers, which serve one run. Children have other ids."""
_START_SECONDS: Final = 300.0
"""The time in which the first worker may start the servers, beyond the timeout."""
_LOOPBACK: Final = "127.0.0.1"

_Addresses: TypeAlias = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedServers:
    """This process among the workers of a run on servers, its link to them, and how others can reach them."""

    workers: Workers
    link: ServerLink
    addresses: _Addresses
    secret: str


def join_servers(
    launched: LaunchSettings,
    served: Served,
    timeout_seconds: float,
    run_dir: Path | None,
    activity: Activity,
    asked: Mapping[str, object] = NOTHING_ASKED,
) -> JoinedServers:
    """Join the workers of a run on servers.

    If the launcher has not started the servers (plain torchrun, several nodes, a single process), the first worker
    starts them as its children, and the others find them through torchrun's store.

    Raises:
        ConfigError: torchrun's environment is incomplete, the servers could not be started, they serve a run for which
            this process was prepared before, or a worker's request (`asked`) is wrong.
        DisagreementError: Another worker joins no servers, or a different number of them.
    """
    rank, count = place_of()
    settings = ServerSettings(
        count=served.servers,
        allow=served.allowed,
        workers=count,
        snapshots=Path(run_dir or "", "snapshots"),
        resume=launched.resume,
        heartbeat_seconds=launched.heartbeat_seconds,
        until_closed=True,
    )
    hosting: Hosting | None = None
    if launched.servers:
        addresses, secret = launched.servers, os.environ[SECRET_VARIABLE]
    elif count == 1 and not dist.is_initialized():
        hosting = _host(settings, run_dir, _LOOPBACK, None, None)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
    else:
        place_of("MASTER_ADDR", "MASTER_PORT")
        store, _ = meet(rank, count, timeout_seconds, asked=asked)
        addresses, secret, hosting = bounded(
            lambda: meet_in_store(store, rank, settings, run_dir, timeout_seconds),
            timeout_seconds + (_START_SECONDS if rank == 0 else 0.0),
            keeper_of(store, os.environ),
        )
    if len(addresses) != served.servers:
        raise ConfigError(
            f"the scheme asks for {served.servers} servers but {len(addresses)} were started: give the launcher the"
            " same scheme"
        )
    if launched.servers:
        joined = f"{os.getpid()} {addresses}"
        if os.environ.get(_JOINED) == joined:
            raise ConfigError(
                "this script calls prepare a second time, but the launcher's servers serve one run: start the script"
                " once for each, or leave the scheme out of evenstep run's options and name it in prepare alone"
            )
        os.environ[_JOINED] = joined
    link = ServerLink(
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
    return JoinedServers(workers=workers, link=link, addresses=addresses, secret=secret)


def join_group(joined: JoinedServers, scheme: Scheme, hosts: Sequence[str]) -> None:
    """Connect this worker to its group's server, if it has one; the group's first worker starts that server.

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
            snapshots=Path(),  # This server keeps no snapshots.
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


def meet_in_store(
    store: Store, rank: int, settings: ServerSettings, run_dir: Path | None, timeout_seconds: float
) -> tuple[_Addresses, str, Hosting | None]:
    """Return the servers' addresses and secret; the first worker starts the servers and publishes where they are.

    On one host it publishes the name of a file with both. With several hosts it publishes the addresses only, since
    the user has given the secret to all workers.
    """
    store = PrefixStore("evenstep/servers", store)
    # A script that calls `prepare` several times uses a new key each time.
    key = f"addresses/{store.add(f'prepared/{rank}', 1)}"
    given = os.environ.get(SECRET_VARIABLE)
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(settings.workers)
    if not one_host and given is None:
        raise ConfigError(
            f"servers beyond one host need a secret: set {SECRET_VARIABLE} to the same 32 or more hexadecimal digits on"
            " every host"
        )
    kept = -1
    if settings.resume and run_dir is not None:  # Hosts may share this folder or each have one.
        kept = Snapshots(settings.snapshots, settings.count).newest
    if rank == 0:
        host = _LOOPBACK if one_host else os.environ.get("MASTER_ADDR", socket.gethostname())
        hosting = _host(settings, run_dir, host, given, store)
        addresses, secret = hosting.servers.addresses, hosting.servers.secret
        handover = Handover(addresses=addresses, secret="" if given else secret, run=run_of(os.environ))
        store.set(f"{key}/kept", str(kept))
        store.set(key, str(handover.write(hosting.folder)) if one_host else "\n".join(map(" ".join, addresses)))
        return addresses, secret, hosting
    told = _await(store, key, timeout_seconds)
    theirs = int(store.get(f"{key}/kept")) if kept >= 0 else -1
    if kept > theirs:
        raise ConfigError(
            f"the newest snapshot in {run_dir} is version {kept} on the host of worker {rank} and version"
            f" {theirs} on that of worker 0, whose servers would go on from it: copy the newer ones there"
        )
    if not one_host:
        assert given is not None
        return tuple(tuple(line.split()) for line in told.split("\n")), given, None
    handover = Handover.read(told, run_of(os.environ))
    if store.add(f"{key}/read", 1) == settings.workers - 1:
        Path(told).unlink(missing_ok=True)
    secret = handover.secret or given or ""
    if not secret:
        raise ConfigError(f"the first worker was given {SECRET_VARIABLE} and this one was not: set it for all of them")
    return handover.addresses, secret, None


def _await(store: Store, key: str, timeout_seconds: float) -> str:
    """Wait for worker 0's message. The store's own wait would print its library's output to the terminal."""
    ends = time.monotonic() + timeout_seconds
    while not store.check([key]):
        if time.monotonic() > ends:
            raise WorkerLostError(
                f"worker 0 has not started the servers within {timeout_seconds:g} s: look at its output, or give"
                " prepare a longer timeout"
            )
        time.sleep(POLL_SECONDS)
    return store.get(key).decode(errors="replace")


def _host(
    settings: ServerSettings, run_dir: Path | None, host: str, secret: str | None, store: Store | None
) -> Hosting:
    """Start the servers as children of this process."""
    kept, resume = False, settings.resume
    if run_dir is not None:  # The servers report what they leave out.
        kept = Snapshots(settings.snapshots, settings.count).latest(lambda _: None) is not None
    if restarted(os.environ, kept=kept or resume):
        resume = resume or kept
    if kept and not resume:
        raise ConfigError(
            f"the run directory {run_dir} holds the snapshots of a run already: give another, or go on from them with"
            " evenstep run --resume"
        )
    scratch = private_folder()
    folder = Path(scratch.name)
    settings = replace(
        settings,
        snapshots=(run_dir or folder) / "snapshots",
        scratch=folder,
        listen=host,
        secret=secret,
        resume=resume,
    )
    try:
        return Hosting(settings, scratch, store)
    except ConfigError:
        scratch.cleanup()
        raise


def restarted(environment: Mapping[str, str], *, kept: bool) -> bool:
    """True if torchrun has restarted all workers, and the servers with them; reports the consequences."""
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    then = "goes on from the servers' last snapshot" if kept else "starts over, for lack of a snapshot in a run_dir"
    say(f"the workers were started again, and the run {then}")
    return True

"""Starts the workers of `evenstep run`, over torchrun's own launcher.

Everything that can be checked is checked before the first process starts. torchrun then starts, watches and stops the
workers, each under a keeper; this module says in one sentence how a run ended. Under a scheme with servers it starts
those first, and one worker's death is not the run's.
"""

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, determine_local_world_size

from evenstep.cluster import parse_slow
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.supervision import Supervision
from evenstep.launch.endings import read_ends
from evenstep.launch.keeper import group_file, keeper_command
from evenstep.launch.launch_settings import LaunchSettings, read_cluster, require_emulable
from evenstep.launch.loopback import LOOPBACK
from evenstep.launch.meeting_place import FRESH_STORE
from evenstep.launch.one_host import ONE_HOST, register
from evenstep.launch.process import SECRET_VARIABLE, SERVER_COMMAND, ServerSettings, start_servers
from evenstep.launch.run_failed import RunFailedError, failure_of, failure_of_all, failure_to_begin, failures_in
from evenstep.launch.watch import FollowsAgent, FollowsServers, Watch, read_group, was_asked
from evenstep.schemes import Served, parse_scheme, placed
from evenstep.telemetry import read_events
from evenstep.telemetry.say import say

STOP_SECONDS = 5.0
MAX_WORKERS = 1024
"""Of one host; each is a process."""

_Command: TypeAlias = tuple[LaunchConfig, Callable[..., object] | str, list[str]]


def launch(
    arguments: argparse.Namespace, settings: LaunchSettings, *, server_command: tuple[str, ...] = SERVER_COMMAND
) -> list[str]:
    """Start the workers and wait until all have finished; none is left when this returns or raises.

    The process's environment, signal handlers and log level are what they were afterwards.

    Args:
        arguments: As torchrun's own parser makes them (`torch.distributed.run.get_args_parser`). A single node that
            names no rendezvous meets on a free port of its own.
        settings: What the workers are told.
        server_command: The server program, for a scheme with servers.

    Returns:
        A sentence for each worker that was lost on the way; under a scheme with servers the others finish without it.

    Raises:
        ConfigError: Something cannot work; no worker was started, or the nodes did not find each other.
        RunFailedError: A worker failed, which is named (under servers: all did), or a signal ended the run.
    """
    _require_script(arguments)
    _require_numbers(arguments.nnodes, arguments.nproc_per_node)
    with _restoring_process():
        config, command, command_arguments = _command(arguments)
        _require_settings(settings, config.nproc_per_node if config.max_nodes == 1 else None)
        scheme = None if settings.scheme is None else parse_scheme(settings.scheme)
        try:
            started = config, command, command_arguments
            with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
                # Over several nodes the workers' addresses are not known before they meet: rank 0's process then starts
                # the servers, and a worker's death ends the run, by torchrun's rule.
                if scheme is not None and scheme.served is not None and config.max_nodes == 1:
                    return _run_with_servers(started, settings, scheme.served, server_command, Path(folder))
                workers = config.nproc_per_node if config.max_nodes == 1 else 0
                with Watch(Path(folder), FollowsAgent(config.max_restarts, workers)):
                    _run_workers(_under_keepers(started, Path(folder), restarts=None), settings, Path(folder))
                return []
        except SignalException as ended:
            text = f"ended by {ended.sigval.name}: every worker was stopped"
            raise RunFailedError(text, exit_code=128 + ended.sigval) from None


def _run_workers(started: _Command, settings: LaunchSettings, status_dir: Path) -> None:
    config, command, command_arguments = started
    os.environ.update(settings.to_environment())
    if config.rdzv_backend == ONE_HOST:
        _keep_gloo_on_this_host()
    elif config.max_restarts or config.min_nodes != config.max_nodes:
        os.environ.setdefault(*FRESH_STORE)
    try:
        elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as failed:
        exit_codes = {worker: each.exitcode for worker, each in failed.failures.items()}
        raise failure_of(read_ends(status_dir), _killed_keepers(status_dir, exit_codes)) from None
    except (RendezvousError, DistError) as error:
        raise ConfigError(
            f"the nodes did not find each other ({_line(error)}): check --rdzv-endpoint, --nnodes and the network"
        ) from error
    finally:
        _stop_leftovers()
        _kill_groups(_groups_of_killed_keepers(status_dir))


def _keep_gloo_on_this_host() -> None:
    """Gloo's sockets would listen on the address that this host's name has, which others may reach."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _under_keepers(started: _Command, status_dir: Path, *, restarts: int | None) -> _Command:
    """The same with each worker under a keeper, which starts it again so often; None leaves that to torchrun's agent.

    The agent sees no worker fail whose keeper starts it again.
    """
    config, command, arguments = started
    # torchrun's --run-path is a function that runs the script in a process which Python has prepared.
    program = [command, *arguments] if isinstance(command, str) else [sys.executable, "-u", *arguments]
    first, *rest = keeper_command(status_dir, restarts=restarts, command=program)
    return replace(config, max_restarts=config.max_restarts if restarts is None else 0), first, rest


# With servers.


def _run_with_servers(
    started: _Command, settings: LaunchSettings, served: Served, server_command: tuple[str, ...], status_dir: Path
) -> list[str]:
    """The sentences about lost workers; servers end after the workers, however those end."""
    config, _, _ = started
    _end_on_signals()
    run_dir = None if settings.run_dir is None else Path(settings.run_dir)
    snapshots = _snapshots(run_dir or status_dir)
    snapshots.mkdir(exist_ok=True)
    server_settings = ServerSettings(
        count=served.servers,
        workers=config.nproc_per_node,
        snapshots=snapshots,
        resume=settings.resume,
        command=server_command,
        heartbeat_seconds=settings.heartbeat_seconds,
        name_lost=False,  # Their keepers tell how they ended.
    )
    supervision = Supervision(workers=config.nproc_per_node, kept=True, restarts=config.max_restarts)
    watch = Watch(status_dir, FollowsServers(supervision, partial(_keep, run_dir)))
    with start_servers(server_settings, partial(_tell, run_dir), watch.told) as servers:
        os.environ[SECRET_VARIABLE] = servers.secret
        with watch:
            kept = _under_keepers(started, status_dir, restarts=config.max_restarts)
            _run_workers(kept, replace(settings, servers=servers.addresses), status_dir)
    ends = read_ends(status_dir)
    failures = failures_in(ends)
    if watch.stopped is not None:
        raise failure_to_begin(watch.stopped, ends)
    if len(failures) == config.nproc_per_node:
        raise failure_of_all(ends, servers.lost)
    how = {end.worker: str(end) for end in failures}
    how |= {worker: f"worker {worker} {lost}" for worker, lost in supervision.lost.items()}
    return [f"{each}; the others finished without it" for _, each in sorted(how.items())]


def _groups_of_killed_keepers(status_dir: Path) -> list[int]:
    groups = [read_group(file)[0] for file in status_dir.glob("group-*")]
    return [group for group in groups if group]


def _killed_keepers(status_dir: Path, exit_codes: Mapping[int, int]) -> dict[int, int]:
    """The signals of keepers that were killed, by worker, but for those that torchrun's agent had asked to end."""
    killed = {worker: -exit_code for worker, exit_code in exit_codes.items() if exit_code < 0}
    return {
        worker: number
        for worker, number in killed.items()
        if number != signal.SIGTERM and not was_asked(group_file(status_dir, worker))
    }


def _tell(run_dir: Path | None, event: Mapping[str, object]) -> None:
    """Tell what happened to a server, and keep it with the run."""
    say(str(event["text"]))
    _keep(run_dir, event)


def _keep(run_dir: Path | None, event: Mapping[str, object]) -> None:
    """Keep with the run what the launcher saw."""
    if run_dir is None:
        return
    # A full disk must not end the watch over the workers.
    with suppress(OSError), (run_dir / "launcher.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**event, "at": time.perf_counter()}, separators=(",", ":")) + "\n")


def _end_on_signals() -> None:
    """What torchrun does once it has started the workers, from now on: servers have to be ended too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, end)


# Before the first process.


def _require_script(arguments: argparse.Namespace) -> None:
    script: str = arguments.training_script
    if arguments.module:
        top = script.partition(".")[0]
        found = importlib.util.find_spec(top) is not None or Path(top).is_dir() or Path(f"{top}.py").is_file()
        if not found:
            raise ConfigError(f"there is no module {top!r} to run with -m: check its name or PYTHONPATH")
    elif arguments.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r} to run: check its name or PATH")
    elif not Path(script).exists():
        raise ConfigError(f"there is no script {script!r}: check the path (options stand before the script)")
    elif Path(script).is_dir() and not Path(script, "__main__.py").exists():
        raise ConfigError(f"{script!r} is a folder without a __main__.py: name the script in it")


def _require_numbers(nodes: str, workers: str) -> None:
    if re.fullmatch(r"[0-9]{1,5}(:[0-9]{1,5})?", nodes) is None:
        raise ConfigError(f"--nnodes must be a number or MINIMUM:MAXIMUM, of at most 99999 nodes, not {shown(nodes)}")
    try:
        count = determine_local_world_size(workers)
    except ValueError as error:
        raise ConfigError(
            f"--workers must be a number, or gpu, cpu or auto where there are such, not {shown(workers)}"
        ) from error
    if count < 1:
        raise ConfigError(f"--workers must be at least 1, not {count}")
    if count > MAX_WORKERS:
        raise ConfigError(f"--workers must be at most {MAX_WORKERS} on one host, not {shown(count)}")


def _command(arguments: argparse.Namespace) -> _Command:
    """The launcher's configuration and what it is to start."""
    arguments = argparse.Namespace(**vars(arguments))
    unmet = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    try:
        if arguments.standalone or (unmet and arguments.nnodes.rpartition(":")[2] == "1"):
            register()
            arguments.rdzv_backend, arguments.rdzv_endpoint = ONE_HOST, LOOPBACK
            arguments.rdzv_id = str(uuid.uuid4())
            # A single node needs no name service, which not every machine has in order.
            arguments.local_addr = arguments.local_addr or LOOPBACK
        elif arguments.master_port is None:
            arguments.master_port = 29500  # As under torchrun: the nodes must agree on one.
        return config_from_args(arguments)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_line(error).rstrip('.')}: see torchrun's documentation of this argument") from error


def _require_settings(settings: LaunchSettings, workers: int | None) -> None:
    """Check the options; `workers` is None where other nodes bring theirs too, which the workers then check."""
    if settings.scheme is not None:
        scheme = parse_scheme(settings.scheme)
        if workers is not None:
            # Refuses groups of other workers than there will be, who are all on this host.
            placed(scheme, ["here"] * workers).sync.policy(workers)
    for text in settings.slow:
        worker = parse_slow(text).worker
        if workers is not None and worker is not None and worker >= workers:
            raise ConfigError(
                f"--slow {text} names worker {worker}, but the {workers} workers are numbered from 0 to {workers - 1}"
            )
    if settings.emulate is not None:
        cluster = read_cluster(Path(settings.emulate))
        require_emulable(cluster)
        described = len(cluster)
        if workers is not None and described != workers:
            raise ConfigError(
                f"{settings.emulate} describes {described} workers but {workers} are to be started:"
                f" give --workers {described} or change the file"
            )
    if not (math.isfinite(settings.heartbeat_seconds) and settings.heartbeat_seconds >= 1):
        raise ConfigError(f"--heartbeat must be a number of seconds, at least 1, not {settings.heartbeat_seconds:g}")
    if settings.resume:
        _require_snapshots(settings, shared=workers is None)
    elif settings.run_dir is not None:
        _require_run_dir(Path(settings.run_dir), shared=workers is None)


def _require_snapshots(settings: LaunchSettings, *, shared: bool) -> None:
    """What --resume needs; over several nodes the snapshots may be on another one, whose servers then look."""
    if settings.scheme is None:
        raise ConfigError("--resume needs --scheme with the scheme of the run, such as --scheme ssp:bound=3")
    if parse_scheme(settings.scheme).served is None:
        raise ConfigError(
            "--resume continues runs whose weights are on servers (asp, ssp, dssp, grouped), not"
            f" {settings.scheme!r}: use evenstep.checkpoint in your script"
        )
    run_dir = Path(str(settings.run_dir))
    if not shared and not _holds_snapshots(run_dir):
        raise ConfigError(f"there is no snapshot of a run in {run_dir}: give the --run-dir of the run to be continued")


def _snapshots(run_dir: Path) -> Path:
    return run_dir / "snapshots"


def _holds_snapshots(run_dir: Path) -> bool:
    snapshots = _snapshots(run_dir)
    return snapshots.is_dir() and any(snapshots.iterdir())


def _require_run_dir(run_dir: Path, *, shared: bool) -> None:
    """Make the directory; one that several nodes share may hold what another node's workers wrote a moment ago."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()
    except OSError as error:
        raise ConfigError(f"the run directory {run_dir} cannot be written ({error.strerror}): give another") from error
    if not shared and _holds_snapshots(run_dir):
        raise ConfigError(
            f"the run directory {run_dir} holds the snapshots of a run already: continue that with --resume {run_dir},"
            " give another or empty it"
        )
    if shared or not any(run_dir.glob("worker-*.jsonl")):
        return
    # A run that ran out of memory is started again where it noted what did not fit.
    if not any(read_events(run_dir, kinds=("out_of_memory",))):
        raise ConfigError(f"the run directory {run_dir} holds the events of a run already: give another or empty it")


# Around the processes.


@contextmanager
def _restoring_process() -> Iterator[None]:
    """Undo what torchrun's launcher does to the process that it runs in, and keep it from talking."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    disabled = logging.root.manager.disable
    # Each process would otherwise take as many threads as there are cores; torchrun does the same, but says so.
    if "OMP_NUM_THREADS" not in environment:
        os.environ["OMP_NUM_THREADS"] = "1"
    # Whoever asks for a log wants torchrun's too.
    if "LOGLEVEL" not in environment and "TORCH_LOGS" not in environment:
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _stop_leftovers() -> None:
    """End what the launcher left, as it does when a second signal interrupts its own clearing up.

    Every worker leads a session of its own, which tells it and its children from what else this process has started.
    """
    mine = os.getsid(0)
    left = []
    for process in psutil.Process().children(recursive=True):
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) != mine:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=STOP_SECONDS)


def _kill_groups(leaders: list[int]) -> None:
    """End what workers that died left behind in their process groups, such as the processes of a data loader."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

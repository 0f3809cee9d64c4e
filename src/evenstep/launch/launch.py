"""Starts the workers of `evenstep run`, with torchrun's launcher.

Everything that can be checked is checked before the first process starts. torchrun then starts, watches and stops the
workers, each under a keeper; this module says in one sentence how a run ended. Under a scheme with servers it starts
those first, and the run survives the death of a worker.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self, final

import psutil
from msgspec import structs
from torch.distributed import DistError
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args

from evenstep.core.ending import Ending, failures_in
from evenstep.core.errors import ConfigError
from evenstep.core.shown import first_line, shown
from evenstep.core.supervision import Supervision
from evenstep.launch.checks import require_numbers, require_script, require_settings
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.one_host import LOOPBACK, ONE_HOST, register
from evenstep.launch.run_failed import RunFailedError, failure_of, failure_of_all, failure_to_begin
from evenstep.launch.server_settings import SECRET_VARIABLE, SERVER_COMMAND, ServerSettings
from evenstep.launch.supervisor import keeper_command
from evenstep.launch.watch import Watch, read_endings, read_kept
from evenstep.schemes import Served, parse_scheme
from evenstep.telemetry.events import LauncherEvent, ServerFailed, ServersLost, ServersRestarted
from evenstep.telemetry.recorder import line_of
from evenstep.telemetry.say import say


def launch(
    arguments: argparse.Namespace,
    settings: LaunchSettings,
    *,
    framework: str | None = None,
    server_command: tuple[str, ...] = SERVER_COMMAND,
) -> list[str]:
    """Start the workers and wait until all have finished; none is left when this returns or raises.

    Afterwards the process's environment, signal handlers and log level are what they were before.

    Args:
        arguments: As torchrun's parser makes them (`torch.distributed.run.get_args_parser`). A single node that names
            no rendezvous meets on a free port.
        settings: The settings for the workers.
        framework: The workers' framework, as for `meeting`; None for PyTorch, whose workers meet by themselves.
        server_command: The server program, for a scheme with servers.

    Returns:
        A sentence for each worker that was lost; under a scheme with servers the others finish without it.

    Raises:
        ConfigError: Something cannot work and no worker was started, or the nodes did not find each other.
        RunFailedError: A worker failed, which is named (under servers: all did), or a signal ended the run.
    """
    require_script(arguments)
    require_numbers(arguments.nnodes, arguments.nproc_per_node)
    with ExitStack() as stack:
        stack.enter_context(_restoring_process())
        status_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-")))
        command = _Command.of(arguments)
        workers = command.workers
        require_settings(settings, workers)
        if settings.elastic is not None:
            from evenstep.launch.lighthouse import require_elastic  # Few runs need it.

            require_elastic(settings)
        python = arguments.training_script if arguments.no_python else sys.executable
        if framework is not None:
            from evenstep.launch.frameworks import meeting  # Few runs need it.

            os.environ.update(stack.enter_context(meeting(framework, workers, python, command.config.max_restarts)))
        served = None if settings.scheme is None else parse_scheme(settings.scheme).served
        try:
            # Over several nodes the addresses of workers are not known before they meet: the process of rank 0 then
            # starts the servers, and the death of a worker ends the run, as under torchrun.
            if served is not None and workers is not None:
                return _run_with_servers(command, workers, settings, served, server_command, status_dir)
            if settings.elastic is not None and workers is not None:
                return _run_elastic(command, workers, settings, status_dir)
            supervision = Supervision(
                workers=workers or 0,
                restarts=command.config.max_restarts,
                together=True,
                silent_seconds=settings.heartbeat_seconds,
                timeout_seconds=settings.timeout_seconds(),
            )
            # PyTorch's workers find out themselves who keeps them waiting.
            marks = settings.marks if framework is not None and workers is not None else None
            with Watch(status_dir, supervision, marks=None if marks is None else Path(marks)):
                _run_workers(command.under_keepers(status_dir, restarts=None), settings, status_dir, supervision)
            return []
        except SignalException as ended:
            text = f"ended by {ended.sigval.name}: every worker was stopped"
            raise RunFailedError(text, exit_code=-ended.sigval) from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """torchrun's configuration, and the program or function that it starts."""

    config: LaunchConfig
    program: Callable[..., object] | str
    arguments: list[str]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Read torchrun's arguments; ConfigError if torchrun refuses them."""
        arguments = argparse.Namespace(**vars(arguments))
        unmet = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
        try:
            if arguments.standalone or (unmet and arguments.nnodes.rpartition(":")[2] == "1"):
                register()
                arguments.rdzv_backend, arguments.rdzv_endpoint = ONE_HOST, LOOPBACK
                arguments.rdzv_id = str(uuid.uuid4())
                # A single node needs no name service, which does not work on every machine.
                arguments.local_addr = arguments.local_addr or LOOPBACK
            elif arguments.master_port is None:
                arguments.master_port = 29500  # As under torchrun: the nodes must agree on one.
            config, program, program_arguments = config_from_args(arguments)
            get_logging_handler(log := getattr(arguments, "event_log_handler", "null"))
        except (AssertionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{first_line(error).rstrip('.')}: see torchrun's documentation of this argument"
            ) from error
        except KeyError as error:  # Raised for an unknown handler.
            raise ConfigError(f"torchrun has no event log handler {shown(log)}: give null or console") from error
        if not config.monitor_interval > 0:
            raise ConfigError(f"--monitor-interval must be above 0 seconds, not {config.monitor_interval:g}")
        return cls(config=config, program=program, arguments=program_arguments)

    @property
    def workers(self) -> int | None:
        """Number of workers; None if other nodes start workers too."""
        return self.config.nproc_per_node if self.config.max_nodes == 1 else None

    def under_keepers(self, status_dir: Path, *, restarts: int | None, processes: int = 1) -> "_Command":
        """Put each worker under a keeper, which restarts it; None leaves restarts to torchrun's agent.

        Args:
            status_dir: Where keepers write down how workers end.
            restarts: The number of times that a worker may be restarted.
            processes: The number of processes of each worker.
        """
        # torchrun's --run-path is a function that runs the script in a process which Python has prepared.
        program = [self.program] if isinstance(self.program, str) else [sys.executable, "-u"]
        command = [*program, *self.arguments]
        first, *rest = keeper_command(status_dir, restarts=restarts, command=command, processes=processes)
        # The agent sees no worker fail whose keeper restarts it.
        config = replace(self.config, max_restarts=self.config.max_restarts if restarts is None else 0)
        return _Command(config=config, program=first, arguments=rest)


def _run_workers(command: _Command, settings: LaunchSettings, status_dir: Path, supervision: Supervision) -> None:
    config = command.config
    os.environ.update(settings.to_environment())
    if config.rdzv_backend == ONE_HOST:
        # Gloo would otherwise listen on the address of this host's name, which others may reach.
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif config.max_restarts or config.min_nodes != config.max_nodes:
        # Torchrun's agent then lets the workers make a new store in each start (pytorch/pytorch#135712).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        elastic_launch(config, command.program)(*command.arguments)
    except ChildFailedError as failed:
        if supervision.stopped is None:
            # Without those that torchrun's agent had asked to end.
            asked = {each.worker for each in read_kept(status_dir) if each.processes and each.asked}
            ends = {worker: -each.exitcode for worker, each in failed.failures.items() if worker not in asked}
            killed = {worker: number for worker, number in ends.items() if number > 0 and number != signal.SIGTERM}
            raise failure_of(read_endings(status_dir), killed) from None
    except (RendezvousError, DistError, ValueError, ImportError) as error:  # The latter two of the rendezvous' options.
        raise ConfigError(
            f"the nodes did not find each other ({first_line(error)}): check --rdzv-backend, --rdzv-endpoint, --nnodes"
            " and the network"
        ) from error
    finally:
        _stop_leftovers()
        # What the workers of killed keepers left, such as the processes of a data loader.
        for each in read_kept(status_dir):
            with suppress(ProcessLookupError, PermissionError):
                if each.processes:
                    os.killpg(each.processes[0], signal.SIGKILL)
    if supervision.stopped is not None:
        raise failure_to_begin(supervision.stopped, read_endings(status_dir))


def _run_with_servers(
    command: _Command,
    workers: int,
    settings: LaunchSettings,
    served: Served,
    server_command: tuple[str, ...],
    status_dir: Path,
) -> list[str]:
    """Run the workers, and servers that outlast them; return the sentences about lost workers."""
    from evenstep.launch.servers import Servers  # Most schemes have none.

    _end_on_signals()
    run_dir = None if settings.run_dir is None else Path(settings.run_dir)
    snapshots = (run_dir or status_dir) / "snapshots"
    snapshots.mkdir(exist_ok=True)
    server_settings = ServerSettings(
        count=served.servers,
        workers=workers,
        snapshots=snapshots,
        resume=settings.resume,
        allow=served.allowed,
        command=server_command,
        heartbeat_seconds=settings.heartbeat_seconds,
        name_lost=False,  # The keepers report how workers ended.
    )

    def record(event: ServersRestarted | ServersLost | ServerFailed) -> None:
        say(event.text)
        _keep(run_dir, event)

    restarts = command.config.max_restarts
    supervision = Supervision(workers=workers, restarts=restarts)
    watch = Watch(status_dir, supervision, record=partial(_keep, run_dir))
    with Servers(server_settings, record, watch.told) as servers:
        os.environ[SECRET_VARIABLE] = servers.secret
        with watch:
            kept = command.under_keepers(status_dir, restarts=restarts)
            _run_workers(kept, structs.replace(settings, servers=servers.addresses), status_dir, supervision)
    ends = read_endings(status_dir)
    failures = failures_in(ends)
    if len(failures) == workers:
        raise failure_of_all(ends, servers.lost)
    return _without(failures, supervision)


def _run_elastic(command: _Command, workers: int, settings: LaunchSettings, status_dir: Path) -> list[str]:
    """Run replicas that come and go under torchft's quorum; return the sentences about lost ones."""
    from evenstep.launch.lighthouse import quorum_of  # torchft is an extra.

    _end_on_signals()
    run_dir = None if settings.run_dir is None else Path(settings.run_dir)
    restarts = command.config.max_restarts or 100  # A mistake in the script must end at last.
    timeout_seconds = settings.timeout_seconds()
    supervision = Supervision(
        workers=workers,
        restarts=restarts,
        elastic=True,
        silent_seconds=settings.heartbeat_seconds,
        timeout_seconds=timeout_seconds,
        alone_seconds=timeout_seconds,
    )
    marks = None if settings.marks is None else Path(settings.marks)
    with quorum_of(settings) as address, Watch(status_dir, supervision, record=partial(_keep, run_dir), marks=marks):
        # It would tell of each replica that its model may have unused parameters.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        kept = command.under_keepers(status_dir, restarts=restarts, processes=settings.nproc_per_replica)
        _run_workers(kept, structs.replace(settings, lighthouse=address), status_dir, supervision)
    ends = read_endings(status_dir)
    failures = [each for each in failures_in(ends) if not each.asked_to_end]
    if all(each.failed for each in ends):
        raise failure_of_all(ends, None) if failures else RunFailedError("no replica finished", exit_code=1)
    return _without(failures, supervision)


def _without(failures: list[Ending], supervision: Supervision) -> list[str]:
    """Return the sentences about lost workers, by rank."""
    how = {end.worker: str(end) for end in failures}
    how |= {worker: f"worker {worker} {lost}" for worker, lost in supervision.lost.items()}
    return [f"{each}; the others finished without it" for _, each in sorted(how.items())]


def _keep(run_dir: Path | None, event: LauncherEvent) -> None:
    """Record an event of the launcher with the run."""
    if run_dir is None:
        return
    # A full disk must not end the watch over the workers.
    with suppress(OSError), (run_dir / "launcher.jsonl").open("ab") as file:
        file.write(line_of(structs.replace(event, at=time.perf_counter())))


def _end_on_signals() -> None:
    """Raise on signals from now on, as torchrun does once workers run, because servers have to be ended too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, end)


@contextmanager
def _restoring_process() -> Iterator[None]:
    """Undo what torchrun's launcher does to the process that it runs in, and keep it quiet."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    disabled = logging.root.manager.disable
    # Each process would otherwise take as many threads as there are cores; torchrun does the same, but says so.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A user who asks for a log wants torchrun's too.
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
    """End the processes that the launcher left, as it does when a second signal interrupts its cleanup.

    Every worker leads a session, which distinguishes it and its children from other processes started here.
    """
    session = os.getsid(0)
    left = []
    for process in psutil.Process().children(recursive=True):
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) != session:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=5.0)  # Killed processes end at once, unless a disk holds them.

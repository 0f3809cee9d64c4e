"""Starts the workers of `evenstep run`, over torchrun's own launcher.

Everything that can be checked is checked before the first process starts. torchrun then starts, watches and stops the
workers; this module says in one sentence how a run ended.
"""

import argparse
import importlib.util
import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, determine_local_world_size

from evenstep.core.cluster import parse_slow
from evenstep.core.errors import ConfigError
from evenstep.runtime.launch_settings import LaunchSettings, read_cluster
from evenstep.runtime.run_failed import RunFailedError, failure_of
from evenstep.schemes import parse_scheme
from evenstep.telemetry import read_events

STOP_SECONDS = 5.0

_Command: TypeAlias = tuple[LaunchConfig, Callable[..., object] | str, list[str]]


def launch(arguments: argparse.Namespace, settings: LaunchSettings) -> None:
    """Start the workers and wait until all have finished; none is left when this returns or raises.

    The process's environment, signal handlers and log level are what they were afterwards.

    Args:
        arguments: As torchrun's own parser makes them (`torch.distributed.run.get_args_parser`). A single node that
            names no rendezvous meets on a free port of its own.
        settings: What the workers are told.

    Raises:
        ConfigError: Something cannot work; no worker was started, or the nodes did not find each other.
        RunFailedError: A worker failed, which is named, or a signal ended the run.
    """
    _require_script(arguments)
    _require_numbers(arguments.nnodes, arguments.nproc_per_node)
    with _restoring_process():
        config, command, command_arguments = _command(arguments)
        _require_settings(settings, config.nproc_per_node if config.max_nodes == 1 else None)
        os.environ.update(settings.to_environment())
        try:
            elastic_launch(config, command)(*command_arguments)
        except ChildFailedError as failed:
            _kill_groups([failure.pid for failure in failed.failures.values()])
            raise failure_of(failed) from None
        except SignalException as ended:
            text = f"ended by {ended.sigval.name}: every worker was stopped"
            raise RunFailedError(text, exit_code=128 + ended.sigval) from None
        except (RendezvousError, DistError) as error:
            raise ConfigError(
                f"the nodes did not find each other ({_line(error)}): check --rdzv-endpoint, --nnodes and the network"
            ) from error
        finally:
            _stop_leftovers()


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


def _require_numbers(nodes: str, workers: str) -> None:
    if re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes) is None:
        raise ConfigError(f"--nnodes must be a number or MINIMUM:MAXIMUM, not {nodes!r}")
    try:
        count = determine_local_world_size(workers)
    except ValueError as error:
        raise ConfigError(
            f"--workers must be a number, or gpu, cpu or auto where there are such, not {workers!r}"
        ) from error
    if count < 1:
        raise ConfigError(f"--workers must be at least 1, not {count}")


def _command(arguments: argparse.Namespace) -> _Command:
    """The launcher's configuration and what it is to start."""
    arguments = argparse.Namespace(**vars(arguments))
    unmet = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    try:
        if arguments.standalone or (unmet and arguments.nnodes.rpartition(":")[2] == "1"):
            arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
            arguments.rdzv_id = str(uuid.uuid4())
            # A single node needs no name service, which not every machine has in order.
            arguments.local_addr = arguments.local_addr or "localhost"
        elif arguments.master_port is None:
            arguments.master_port = 29500  # As under torchrun: the nodes must agree on one.
        return config_from_args(arguments)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_line(error).rstrip('.')}: see torchrun's documentation of this argument") from error


def _require_settings(settings: LaunchSettings, workers: int | None) -> None:
    """Check the options; `workers` is None where other nodes bring theirs too, which the workers then check."""
    if settings.scheme is not None:
        parse_scheme(settings.scheme)
    for text in settings.slow:
        worker = parse_slow(text).worker
        if workers is not None and worker is not None and worker >= workers:
            raise ConfigError(
                f"--slow {text} names worker {worker}, but the {workers} workers are numbered from 0 to {workers - 1}"
            )
    if settings.emulate is not None:
        described = len(read_cluster(Path(settings.emulate)))
        if workers is not None and described != workers:
            raise ConfigError(
                f"{settings.emulate} describes {described} workers but {workers} are to be started:"
                f" give --workers {described} or change the file"
            )
    if settings.run_dir is not None:
        _require_run_dir(Path(settings.run_dir), shared=workers is None)


def _require_run_dir(run_dir: Path, *, shared: bool) -> None:
    """Make the directory; one that several nodes share may hold what another node's workers wrote a moment ago."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()
    except OSError as error:
        raise ConfigError(f"the run directory {run_dir} cannot be written ({error.strerror}): give another") from error
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

"""Checks of `evenstep run`'s options, made before the first process starts."""

import argparse
import importlib.util
import math
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path

from torch.distributed.run import determine_local_world_size

from evenstep.cluster import parse_slow
from evenstep.core.errors import ConfigError, naming
from evenstep.core.load import Static
from evenstep.core.shown import shown
from evenstep.core.sync.checked import sync_policy
from evenstep.launch.launch_settings import LaunchSettings, read_cluster, read_timeout, require_emulable
from evenstep.schemes import parse_scheme, placed
from evenstep.telemetry import read_events
from evenstep.telemetry.events import RanOutOfMemory
from evenstep.telemetry.recorder import writing_to

MAX_WORKERS = 1024
"""The most workers of one host; each is a process."""


def require_script(arguments: argparse.Namespace) -> None:
    """Refuse a script, module or program that does not exist."""
    script: str = arguments.training_script
    if arguments.module:
        top = script.partition(".")[0]
        if importlib.util.find_spec(top) is None and not Path(top).is_dir() and not Path(f"{top}.py").is_file():
            raise ConfigError(f"there is no module {top!r} to run with -m: check its name or PYTHONPATH")
    elif arguments.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r} to run: check its name or PATH")
    elif not Path(script).exists():
        raise ConfigError(f"there is no script {script!r}: check the path (options stand before the script)")
    elif Path(script).is_dir() and not Path(script, "__main__.py").exists():
        raise ConfigError(f"{script!r} is a folder without a __main__.py: name the script in it")


def require_numbers(nodes: str, workers: str) -> None:
    """Refuse impossible numbers of nodes and workers."""
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


def require_settings(settings: LaunchSettings, workers: int | None) -> None:
    """Check the options; `workers` is None if other nodes start workers too, which then make these checks.

    Workers may have several processes each, of which this many are to be started: they make the exact checks.
    """
    source_of = partial(settings.source, environment=os.environ)
    scheme = settings.asked_scheme(source_of)
    if scheme is not None and workers is not None:
        with naming(source_of("scheme" if settings.batch_sizes is None else "batch_sizes")):
            # Refuses groups and sizes for another number of workers; all workers are on this host.
            sync_policy(placed(scheme, ["here"] * workers).sync, workers)
            if isinstance(scheme.load, Static) and workers % len(scheme.load.sizes):
                scheme.load.require(workers)
    for text in settings.slow:
        source = source_of("slow")
        worker = parse_slow(text, source).worker
        if workers is not None and worker is not None and worker >= workers:
            known = (
                "there is worker 0 only"
                if workers == 1
                else f"the {workers} workers are numbered from 0 to {workers - 1}"
            )
            raise ConfigError(f"{source} {text} names worker {worker}, but {known}")
    if settings.emulate is not None:
        with naming(source_of("emulate")):
            _require_cluster(Path(settings.emulate), workers)
    if settings.timeout is not None:
        read_timeout(settings.timeout, source_of("timeout"))
    if not (math.isfinite(settings.heartbeat_seconds) and settings.heartbeat_seconds >= 1):
        raise ConfigError(f"--heartbeat must be a number of seconds, at least 1, not {settings.heartbeat_seconds:g}")
    if settings.resume:
        _require_snapshots(settings, shared=workers is None)
    elif settings.run_dir is not None:
        with naming(source_of("run_dir")):
            _require_run_dir(Path(settings.run_dir), shared=workers is None)


def _require_cluster(path: Path, workers: int | None) -> None:
    cluster = read_cluster(path)
    require_emulable(cluster)
    described = len(cluster)
    if workers is not None and workers % described:
        raise ConfigError(
            f"{path} describes {described} workers but {workers} are to be started:"
            f" give --workers {described} or change the file"
        )


def _require_snapshots(settings: LaunchSettings, *, shared: bool) -> None:
    """Check what --resume needs. With several nodes the snapshots may be on another node, whose servers then check."""
    if settings.scheme is None:
        raise ConfigError("--resume needs --scheme with the scheme of the run, such as --scheme ssp:bound=3")
    if parse_scheme(settings.scheme).served is None:
        raise ConfigError(
            "--resume continues runs whose weights are on servers (asp, ssp, dssp, grouped), not"
            f" {settings.scheme!r}: use evenstep.checkpoint in your script"
        )
    run_dir = Path(str(settings.run_dir))
    if not shared and not any((run_dir / "snapshots").glob("version-*/shard-*.pt")):
        raise ConfigError(f"there is no snapshot of a run in {run_dir}: give the --run-dir of the run to be continued")


def _require_run_dir(run_dir: Path, *, shared: bool) -> None:
    """Make the directory; if several nodes share it, it may hold what the workers of another node just wrote."""
    with writing_to(run_dir):
        tempfile.TemporaryFile(dir=run_dir).close()
    if not shared and any((run_dir / "snapshots").glob("*")):
        raise ConfigError(
            f"the run directory {run_dir} holds the snapshots of a run already: continue that with --resume {run_dir},"
            " give another or empty it"
        )
    if shared or not any(run_dir.glob("worker-*.jsonl")):
        return
    # A run that ran out of memory is started again in the directory where it noted what did not fit.
    if not any(read_events(run_dir, kind=RanOutOfMemory)):
        raise ConfigError(f"the run directory {run_dir} holds the events of a run already: give another or empty it")

"""A device that ran out of memory: recorded and named before the process dies, and heeded when it is started again."""

import sys
from pathlib import Path
from types import TracebackType
from typing import final

import torch

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.runtime.balancer import Balancer
from evenstep.runtime.hold import EmulatedOutOfMemoryError
from evenstep.telemetry import Recorder, read_events


@final
class OutOfMemoryError(EvenstepError, MemoryError):
    """A worker's device could not hold its batch; the message names the worker, the batch and what to do."""


def name_out_of_memory(balancer: Balancer, recorder: Recorder, device: str, run_dir: Path | None) -> None:
    """From now on, record and name an error of memory that ends this process while it trains.

    `device` identifies the device, and `run_dir` is where the next run will look for what is recorded.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        now = balancer.iteration
        if balancer.closed or now is None or not isinstance(error, torch.OutOfMemoryError | EmulatedOutOfMemoryError):
            before(kind, error, traceback)
            return
        size = len(now.piece.positions)
        recorder.record({"event": "out_of_memory", "iteration": now.number, "device": device, "samples": size})
        named = OutOfMemoryError(_sentence(balancer.workers.rank, size, run_dir))
        named.__cause__ = error
        before(type(named), named, traceback)

    sys.excepthook = hook


def failed_size(run_dir: Path, device: str) -> int | None:
    """The smallest batch that this device could not hold in earlier runs into this directory; None for none."""
    try:
        events = list(read_events(run_dir, kinds=("out_of_memory",)))
    except ConfigError:
        return None  # A new run directory, or a damaged one, which will be found out elsewhere.
    return min((event["samples"] for event in events if event["device"] == device), default=None)


def _sentence(worker: int, size: int, run_dir: Path | None) -> str:
    again = (
        "give a run_dir (--run-dir), so that the next start knows, or a smaller global batch"
        if run_dir is None
        else f"start again with the same run directory {run_dir}, and this worker's batches stay below it"
    )
    return f"worker {worker} ran out of memory with a batch of {size} samples: {again}"

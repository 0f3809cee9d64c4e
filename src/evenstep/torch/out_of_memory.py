"""A device that ran out of memory: recorded and named before the process dies, and heeded when it is started again."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.telemetry import Recorder, read_events
from evenstep.worker.balancer import Balancer
from evenstep.worker.hold import EmulatedOutOfMemoryError


@final
class OutOfMemoryError(EvenstepError, MemoryError):
    """A worker's device could not hold its batch; the message names the worker, the batch and what to do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The smallest batch that a device could not hold, and the largest that had run before, 0 for none."""

    samples: int
    largest_run: int


def named_out_of_memory(
    balancer: Balancer, error: BaseException, recorder: Recorder, device: str, advice: str
) -> BaseException:
    """An error of memory while this worker computes on a batch, recorded and with its name; any other as it is.

    `device` identifies the device; `advice` says what to do now.
    """
    now = balancer.iteration
    training = now is not None and now.paused is None
    if now is None or not training or not isinstance(error, torch.OutOfMemoryError | EmulatedOutOfMemoryError):
        return error
    size = len(now.piece.positions)
    recorder.record(
        {
            "event": "out_of_memory",
            "iteration": now.number,
            "at": time.perf_counter(),
            "device": device,
            "samples": size,
            "largest_run": balancer.largest_run,
        }
    )
    named = OutOfMemoryError(
        f"worker {balancer.workers.rank} ran out of memory with a batch of {size} samples: {advice}"
    )
    named.__cause__ = error
    return named


def read_failure(run_dir: Path, device: str) -> Failure | None:
    """What this device could not hold in earlier runs into this directory; None where it held everything."""
    try:
        events = list(read_events(run_dir, kinds=("out_of_memory",)))
    except ConfigError:
        return None  # A new run directory, or a damaged one, which will be found out elsewhere.
    mine = [event for event in events if event["device"] == device]
    if not mine:
        return None
    failed = min(event["samples"] for event in mine)
    ran = (event["largest_run"] for event in mine if event["largest_run"] < failed)
    return Failure(samples=failed, largest_run=max(ran, default=0))

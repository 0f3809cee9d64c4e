"""The events of a worker that a person would want to read, through Python's logging, with its rank named."""

import logging
from collections.abc import Mapping
from typing import Any, final

from evenstep.telemetry.recorder import Recorder


@final
class Logged:
    """Passes every event on, and logs the few that matter to the logger `evenstep`.

    INFO: a worker begins, or is made slower on purpose. DEBUG: sizes change. WARNING: a device runs out of memory.
    ERROR: an exception ends the script. A script sees them by `logging.basicConfig(level=logging.INFO)`.
    """

    def __init__(self, recorder: Recorder, worker: int) -> None:
        self._recorder = recorder
        self._logger = logging.getLogger("evenstep")
        self._worker = worker

    def record(self, event: Mapping[str, Any]) -> None:
        """Keep one event."""
        self._recorder.record(event)
        kind = event["event"]
        if kind == "iteration" or kind == "note":
            return
        if kind == "run":
            self._log(
                logging.INFO,
                f"{event['scheme']} with {event['workers']} workers, global batch {event['global_batch_size']}",
            )
        elif kind == "plan":
            self._log(logging.DEBUG, f"sizes from iteration {event['iteration']}: {event['batch_sizes']}")
        elif kind == "out_of_memory":
            self._log(logging.WARNING, f"out of memory with a batch of {event['samples']} samples")
        elif kind == "disturbance":
            slower = f"{event['factor']:g} times its seconds and {event['extra_seconds']:g} s more"
            self._log(logging.INFO, f"emulated slowness from iteration {event['iteration']}: {slower}")
        elif kind == "error":
            self._log(logging.ERROR, f"failed: {event['type']}: {event['text']}")

    def _log(self, level: int, text: str) -> None:
        self._logger.log(level, "worker %d: %s", self._worker, text)

    def close(self) -> None:
        """Nothing more will come."""
        self._recorder.close()

"""The numbers of an iteration that TensorBoard and Prometheus show alike."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_SECONDS: Final = ("iteration_seconds", "input_seconds", "compute_seconds", "wait_seconds", "comm_seconds")
_PUSH: Final = ("staleness", "behind", "lead")


def scalars_of(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values: batch size, speed, the parts in seconds, and on servers how stale and how far ahead."""
    yield "batch_size", event["samples"]
    if event["compute_seconds"] > 0:
        yield "speed_samples_per_second", event["samples"] / event["compute_seconds"]
    for name in (*_SECONDS, *_PUSH):
        if name in event:
            yield name, event[name]

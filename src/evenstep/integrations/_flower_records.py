"""Flower's records: work in a config, seconds in metrics, and arrays as changes of the model."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import Mode, Work
from evenstep.core.shown import shown

BATCH_SIZE: Final = "batch-size"
"""The key of a client's batch size in the ConfigRecord."""

STEPS: Final = "steps"
"""The key of a client's number of local steps in the ConfigRecord."""

RATE: Final = "lr"
"""The key of a client's learning rate in the ConfigRecord."""

SECONDS: Final = "evenstep-seconds"
"""The key of the seconds of compute in the MetricRecord, which `measured` sets."""


def mean_work(config: ConfigRecord, mode: Mode) -> Work:
    """The mean work of the nodes, from the training config.

    Raises:
        ConfigError: A value that the mode needs is missing or not a positive number.
    """
    size = _whole(config, BATCH_SIZE)
    if size is None:
        raise ConfigError(
            f"LoadBalanced needs the mean batch size of the nodes, and train_config has"
            f' {shown(config.get(BATCH_SIZE))}: give start(train_config=ConfigRecord({{"{BATCH_SIZE}": 32}}))'
        )
    steps = _whole(config, STEPS)
    if steps is None and mode == "steps":
        raise ConfigError(
            f'mode="steps" needs the mean number of local steps, and train_config has {shown(config.get(STEPS))}: put'
            f' "{STEPS}": 20 into it'
        )
    if mode == "batch-and-lr" and not isinstance(config.get(RATE), float):
        raise ConfigError(
            f'mode="batch-and-lr" changes the learning rate, and train_config has {shown(config.get(RATE))}: put'
            f' "{RATE}": 0.1 into it'
        )
    return Work(size, steps or 1)


def _whole(config: ConfigRecord, name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def with_work(content: RecordDict, work: Work, mode: Mode) -> RecordDict:
    """A copy of the records with this work in the config; the strategy gives one object to all nodes."""
    records = dict(content.items())
    for name, config in content.config_records.items():
        if BATCH_SIZE not in config:
            continue
        changed: dict[str, int | float] = {BATCH_SIZE: work.batch_size}
        if mode == "steps":
            changed = {STEPS: work.steps}
        elif mode == "batch-and-lr":
            changed[RATE] = config[RATE] * work.rate
        records[name] = ConfigRecord({**config, **changed})
    return RecordDict(records)


def taken_seconds(content: RecordDict) -> object:
    """Remove the seconds from the metrics of a reply and return them; not all nodes may send them."""
    taken: object = None
    for metrics in content.metric_records.values():
        found = metrics.pop(SECONDS, None)
        taken = found if taken is None else taken
    return taken


def said_seconds(content: RecordDict) -> float:
    """The seconds of compute in a reply, which stay in it; 0 if they are not a finite positive number."""
    said = next((metrics[SECONDS] for metrics in content.metric_records.values() if SECONDS in metrics), 0.0)
    return float(said) if isinstance(said, int | float) and 0.0 < said < math.inf else 0.0


def examples_of(content: RecordDict, key: str) -> float:
    """The weight of a reply; 0 if it has none."""
    value = next((metrics[key] for metrics in content.metric_records.values() if key in metrics), 0)
    return float(value) if isinstance(value, int | float) else 0.0


def wrong_with(content: RecordDict, key: str, model: ArrayRecord) -> str | None:
    """Why a reply cannot be part of a mean of such models, in one clause."""
    if [set(each) for each in content.array_records.values()] != [set(model)]:
        return "has other arrays than the model"
    for record in content.array_records.values():
        for name, array in record.items():
            try:
                values = array.numpy()
            except (EOFError, OSError, TypeError, ValueError):
                return f"has bytes in {shown(name)} that are not an array"
            # The shape and type that the record states are the node's words.
            if values.shape != tuple(model[name].shape) or values.dtype.kind in "SUMm":
                return "has other arrays than the model"
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                return f"has a NaN or an infinity in {shown(name)}"
    if not any(key in metrics for metrics in content.metric_records.values()):
        return f"has no {shown(key)} in its metrics"
    weight = examples_of(content, key)
    if not 0.0 < weight < math.inf:
        return f"has {shown(weight)} as {shown(key)}"
    return None


def set_examples(content: RecordDict, key: str, examples: int) -> None:
    """Set the weight of a reply."""
    for metrics in content.metric_records.values():
        if key in metrics:
            metrics[key] = examples


def rebased(content: RecordDict, old: ArrayRecord, new: ArrayRecord, factor: float) -> RecordDict:
    """The reply of a node that trained from `old`, as `new` plus `factor` times its change of `old`.

    Arrays of whole numbers, such as counters, are unchanged.
    """
    records = dict(content.items())
    for name, record in content.array_records.items():
        records[name] = ArrayRecord({key: _moved(key, array, old, new, factor) for key, array in record.items()})
    return RecordDict(records)


def _moved(key: str, array: Array, old: Mapping[str, Array], new: Mapping[str, Array], factor: float) -> Array:
    values = array.numpy()
    if values.dtype.kind not in "fc" or key not in old:
        return array
    moved = new[key].numpy() + factor * (values - old[key].numpy())
    return Array(np.asarray(moved, dtype=values.dtype))


def measured(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of a ClientApp that adds the seconds of training to the metrics of its reply.

    It measures the mods after it and the app, but not the transfer of messages: put it last in `mods`.
    """
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    began = time.perf_counter()
    reply = call_next(message, context)
    seconds = time.perf_counter() - began
    if not reply.has_error():
        metrics = next(iter(reply.content.metric_records.values()), None)
        if metrics is None:
            metrics = MetricRecord()
            reply.content["metrics"] = metrics
        metrics[SECONDS] = seconds
    return reply

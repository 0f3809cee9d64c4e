"""Flower's records: work in a config, seconds in metrics, and arrays as changes of the model."""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
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
"""The key of the compute seconds in the MetricRecord, which `measured` sets."""

STATISTICS: Final = ("running_mean", "running_var", "moving_mean", "moving_variance", "batch_stats")
"""Parts of the names of arrays that are statistics of the data, in PyTorch, Keras and Flax."""

_MOST_EXAMPLES: Final = 2**53
"""Above this limit, weights are not exact, and their sum may be infinite."""

_log = logging.getLogger("flwr")


def config_of(messages: Sequence[Message], config: ConfigRecord) -> ConfigRecord:
    """The config with a batch size that the strategy sends, which may change the given one; else the given one."""
    sent = messages[0].content.config_records.values() if messages else ()
    return next((each for each in sent if BATCH_SIZE in each), config)


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
    """Copy the records and set this work in the config; the strategy gives one object to all nodes."""
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
    """Remove the seconds from a reply's metrics and return them, because not all nodes may send them."""
    taken: object = None
    for metrics in content.metric_records.values():
        found = metrics.pop(SECONDS, None)
        taken = found if taken is None else taken
    return taken


def said_seconds(reply: Message) -> float:
    """The compute seconds in a reply, which stay in it; 0 if they are not a finite positive number."""
    records = reply.content.metric_records.values() if reply.has_content() else ()
    said = next((metrics[SECONDS] for metrics in records if SECONDS in metrics), 0.0)
    return float(said) if isinstance(said, int | float) and 0.0 < said < math.inf else 0.0


def examples_of(content: RecordDict, key: str) -> float:
    """The weight of a reply; 0 if it has none."""
    value = next((metrics[key] for metrics in content.metric_records.values() if key in metrics), 0)
    return float(value) if isinstance(value, int | float) else 0.0


def wrong_with(reply: Message, key: str, model: ArrayRecord | None) -> str | None:
    """The reason why a reply cannot be part of a mean, as a clause; without a model, the reply has only metrics."""
    try:
        if model and (wrong := _wrong_arrays(reply.content, model)):
            return wrong
        if not any(key in metrics for metrics in reply.content.metric_records.values()):
            return f"has no {shown(key)} in its metrics"
        weight = examples_of(reply.content, key)
        return None if 0.0 < weight <= _MOST_EXAMPLES else f"has {shown(weight)} as {shown(key)}"
    except Exception as error:  # The node wrote all of it, and must not be able to end the training of the others.
        return f"cannot be read: {type(error).__name__}: {error}"


def _wrong_arrays(content: RecordDict, model: ArrayRecord) -> str | None:
    if [set(each) for each in content.array_records.values()] != [set(model)]:
        return "has other arrays than the model"
    for record in content.array_records.values():
        for name, array in record.items():
            try:
                values = array.numpy()  # As its bytes say; the record may state another shape and type.
            except (EOFError, MemoryError, TypeError, ValueError):
                return f"has bytes in {shown(name)} that are not an array"
            own = model[name].numpy()
            if values.shape != own.shape:
                return "has other arrays than the model"
            if values.dtype != own.dtype:
                return f"has {values.dtype} in {shown(name)}, and the model {own.dtype}"
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                return f"has a NaN or an infinity in {shown(name)}"
    return None


def of_one_form(replies: list[Message]) -> list[Message]:
    """The replies with the most common set of records and metrics; others cannot be part of the same mean."""
    forms = [_form(reply.content) for reply in replies]
    usual = Counter(forms).most_common(1)[0][0] if forms else None
    usable = []
    for reply, form in zip(replies, forms, strict=True):
        if form == usual:
            usable.append(reply)
            continue
        node = reply.metadata.src_node_id
        _log.warning("the reply of node %d has other records or metrics than most, and is left out", node)
    return usable


def _form(content: RecordDict) -> frozenset[tuple[str, str, int | None]]:
    names = {(name, "", None) for name in content.array_records}
    return frozenset(names).union(
        (name, key, len(value) if isinstance(value, list) else None)
        for name, metrics in content.metric_records.items()
        for key, value in metrics.items()
        if key != SECONDS
    )


def with_types(arrays: ArrayRecord, model: ArrayRecord) -> ArrayRecord:
    """Convert these arrays to the model's types: a strategy's mean of integers has fractions."""
    return ArrayRecord({name: _as(array, model.get(name, array)) for name, array in arrays.items()})


def _as(array: Array, own: Array) -> Array:
    if array.dtype == own.dtype:
        return array
    values = array.numpy()
    return Array(np.asarray(values if "float" in own.dtype else np.rint(values), dtype=own.dtype))


def rebased(
    content: RecordDict, old: ArrayRecord, new: ArrayRecord, factor: float, statistics: Collection[str]
) -> RecordDict:
    """Return the reply of a node that trained from `old`, as `new` plus `factor` times its change of `old`.

    Statistics, such as those of BatchNorm, instead move towards the node's by `factor`, because a variance plus a
    change of another one may be negative. Integer arrays, such as counters, are unchanged.
    """
    records = dict(content.items())
    for name, record in content.array_records.items():
        moved = {}
        for key, array in record.items():
            begun = old if set(re.split(r"[./:]", key)).isdisjoint(statistics) else new
            moved[key] = _moved(array, begun[key], new[key], factor)
        records[name] = ArrayRecord(moved)
    return RecordDict(records)


def _moved(array: Array, old: Array, new: Array, factor: float) -> Array:
    values = array.numpy()
    if values.dtype.kind not in "fc":
        return array
    moved = new.numpy() + factor * (values - old.numpy())
    return Array(np.asarray(moved, dtype=values.dtype))


def measured(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of a ClientApp that adds the training seconds to the metrics of its reply.

    It measures the app and the mods after it, but not the transfer of messages: put it last in `mods`.
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

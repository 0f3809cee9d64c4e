"""Flower: rounds in which nodes of different speeds finish together.

    from evenstep.integrations.flower import LoadBalanced, measured

    strategy = LoadBalanced(FedAvg())         # in the ServerApp
    app = ClientApp(mods=[measured])          # in the ClientApp

`LoadBalanced` wraps a strategy, as Flower's own wrappers for differential privacy do. Nothing here imports PyTorch.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Final, final

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from evenstep.core.errors import ConfigError
from evenstep.core.load.rounds import RoundSizes
from evenstep.core.shown import shown
from evenstep.schemes import Scheme, parse_scheme

BATCH_SIZE: Final = "batch-size"
"""Where a client finds its batch size in the ConfigRecord."""

SECONDS: Final = "evenstep-seconds"
"""Where `measured` puts the seconds of compute in the MetricRecord."""

_log = logging.getLogger("flwr")


@final
class LoadBalanced(Strategy):
    """Wraps a strategy so that each node trains with its own batch size: slow nodes with smaller ones (LB-BSP).

    Local steps and the learning rate stay the strategy's, alike for all nodes (TCC'21's federated algorithm). The mean
    of the batch sizes of a round is the `batch-size` of the training config. A client must take its number of steps
    from the config, too, or from a constant: in a loop over its whole dataset, a smaller batch means more steps.

    Args:
        strategy: Decides everything but the batch sizes.
        load: Whose sizes: `lb-bsp` with its parameters, `bsp` for equal sizes, or what a recipe returns.

    Raises:
        ConfigError: The scheme is unknown, or its sizes do not go with nodes that come and go.
    """

    def __init__(self, strategy: Strategy, load: Scheme | str = "lb-bsp") -> None:
        self.strategy = strategy
        scheme = parse_scheme(load) if isinstance(load, str) else load
        self._name = scheme.name
        self._sizes = RoundSizes(scheme.load)
        self._given: dict[int, int] = {}

    def summary(self) -> None:
        """Log the wrapped strategy's configuration, and this one's."""
        self.strategy.summary()
        _log.info("\t└──> evenstep: batch sizes of %s", self._name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, each with the batch size of its node.

        Raises:
            ConfigError: The config has no whole number as `batch-size`.
        """
        mean = config.get(BATCH_SIZE)
        if not isinstance(mean, int) or isinstance(mean, bool) or mean < 1:
            raise ConfigError(
                f"LoadBalanced needs the mean batch size of the nodes, and train_config has {shown(mean)}: give"
                f' start(train_config=ConfigRecord({{"{BATCH_SIZE}": 32}}))'
            )
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        sizes = self._sizes.sizes([message.metadata.dst_node_id for message in messages], mean)
        for message in messages:
            message.content = _with_size(message.content, sizes[message.metadata.dst_node_id])
        self._given = dict(sizes)
        if sizes:
            _log.info("configure_train: batch sizes from %d to %d", min(sizes.values()), max(sizes.values()))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Learn the nodes' speeds; the wrapped strategy aggregates the replies, without the seconds in them."""
        received = list(replies)
        for reply in received:
            if not reply.has_error():
                self._learn(reply.metadata.src_node_id, _taken(reply.content))
        return self.strategy.aggregate_train(server_round, received)

    def _learn(self, node: int, seconds: object) -> None:
        size = self._given.get(node)
        if size is None:  # It was not asked in this round.
            return
        if seconds is None:
            _log.warning("node %d sends no %s: give its ClientApp mods=[measured]", node, SECONDS)
        elif not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:
            _log.warning("node %d says that it has trained for %s seconds, which is left out", node, shown(seconds))
        else:
            self._sizes.observe(node, size, float(seconds))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)


def measured(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of a ClientApp that adds the seconds of training to the metrics of its reply.

    It measures what comes after it in `mods`, and the app: put it last. Messages travel before and after that.
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


def _with_size(content: RecordDict, size: int) -> RecordDict:
    """The same records, of which the strategy gives one object to all nodes, with this batch size in the config."""
    records = dict(content.items())
    for name, config in content.config_records.items():
        if BATCH_SIZE in config:
            records[name] = ConfigRecord({**config, BATCH_SIZE: size})
    return RecordDict(records)


def _taken(content: RecordDict) -> object:
    """The seconds of a reply, taken out of its metrics: a mean over nodes says nothing, and some may not measure."""
    taken: object = None
    for metrics in content.metric_records.values():
        found = metrics.pop(SECONDS, None)
        taken = found if taken is None else taken
    return taken

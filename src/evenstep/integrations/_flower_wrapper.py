"""A strategy that wraps another one."""

import logging
from collections.abc import Collection, Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.integrations._flower_records import of_one_form, wrong_with

_log = logging.getLogger("flwr")


class Wrapper(Strategy):
    """Forwards to the wrapped strategy; a base for wrappers that change a part of it.

    Attributes:
        strategy: The wrapped strategy.
        statistics: Parts of the names of arrays that are statistics instead of parameters.

    Raises:
        ConfigError: It is not a strategy, or it is one of these wrappers.
    """

    def __init__(self, strategy: Strategy, statistics: Collection[str]) -> None:
        name = type(self).__name__
        if not isinstance(strategy, Strategy):
            raise ConfigError(
                f"{name} wraps a strategy of flwr.serverapp.strategy, not {shown(strategy)}: give an instance, such as"
                " FedAvg(). Those of flwr.server.strategy, Flower's older API, have no messages that it could change"
            )
        if isinstance(statistics, str):
            raise ConfigError(f"statistics are names, not one text: give [{shown(statistics)}]")
        self.statistics = statistics
        if isinstance(strategy, Wrapper):
            raise ConfigError(
                f"{name} cannot wrap {type(strategy).__name__}, which shares out the work of the nodes itself: wrap the"
                " strategy inside it"
            )
        self.strategy = strategy
        if isinstance(self._innermost, FedXgbBagging | FedXgbCyclic):
            raise ConfigError(
                f"{name} cannot wrap {type(self._innermost).__name__}, whose models are trees: they have no mean, and"
                " are trained without batches"
            )

    @property
    def _innermost(self) -> object:
        """The strategy that aggregates, even inside a wrapper for privacy."""
        inner: object = self.strategy
        while not hasattr(inner, "weighted_by_key") and hasattr(inner, "strategy"):
            inner = inner.strategy
        return inner

    @property
    def weight_key(self) -> str:
        """The metric that is a reply's weight."""
        return str(getattr(self._innermost, "weighted_by_key", "num-examples"))

    def summary(self) -> None:
        self.strategy.summary()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Like the wrapped strategy, without unusable replies."""
        replies = list(replies)
        usable = of_one_form([each for each in replies if not each.has_error() and self.usable(each, None)])
        return self.strategy.aggregate_evaluate(server_round, [each for each in replies if each.has_error()] + usable)

    def usable(self, reply: Message, model: ArrayRecord | None) -> bool:
        """True if a reply can be part of a mean; otherwise the log names its node."""
        wrong = wrong_with(reply, self.weight_key, model)
        if wrong is not None:
            _log.warning("the reply of node %d %s, and is left out", reply.metadata.src_node_id, wrong)
        return wrong is None

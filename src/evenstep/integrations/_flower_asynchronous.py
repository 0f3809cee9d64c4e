"""Flower without rounds: each node gets the newest model as soon as the sync policy allows it."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final, Literal, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import AsynchronousRounds, Counted, Step
from evenstep.core.sync import Unbounded
from evenstep.integrations._flower_grid import Exchange, Reply, View
from evenstep.integrations._flower_log import RunLog
from evenstep.integrations._flower_records import (
    BATCH_SIZE,
    STATISTICS,
    STEPS,
    examples_of,
    of_one_form,
    rebased,
    said_seconds,
    taken_seconds,
    with_types,
)
from evenstep.integrations._flower_wrapper import Wrapper
from evenstep.schemes import Scheme, parse_scheme

_MEMBERS_EVERY: Final = 1.0
"""Seconds between two queries of the connected nodes."""

_log = logging.getLogger("flwr")


@final
class Asynchronous(Wrapper):
    """Wraps a strategy so that nodes do not wait for each other, or only within the bound of `sync`.

    `start` replaces the loop over rounds: a node that has replied gets the newest model as soon as the sync policy
    allows it. The wrapped strategy aggregates the replies of each update, as changes of the model times their factors;
    `AsynchronousRounds` has the equations. The strategy must put the same content into its messages to all nodes.
    Every node takes part, and `fraction_train` has no effect. `server-round` in a message is the number of rounds'
    worth of work so far, plus one.

    A node that vanishes, fails or is away for longer than the timeout leaves, and joins again when it is back. Unusable
    replies change nothing. Nodes evaluate once, at the end; `evaluate_fn` is called after each round's worth of
    work.

    Args:
        strategy: Makes the messages and aggregates the replies of each update.
        sync: `asp`, `ssp:bound=3`, `dssp:lower=3,upper=15`, `grouped:groups=4`, or another scheme with equal sizes that
            bounds the lead of a worker. An iteration is a piece of a node's work.
        buffer: The least number of replies per update. With `asp` this is FedBuff.
        rate: `share`: by the node's share of all examples and its rounds behind. `raw`: FedBuff's.
        statistics: Parts of the names of arrays that are statistics of the data, which are averaged. For other arrays,
            changes are added.
        run_dir: The folder for the events that `evenstep report` reads.
        clock: Returns seconds, such as `time.monotonic`.
        sleep: Waits for this many seconds.

    Raises:
        ConfigError: The scheme is unknown or sizes batches by speed, or this is not a strategy that can be wrapped.
    """

    def __init__(
        self,
        strategy: Strategy,
        sync: Scheme | str = "ssp:bound=3",
        *,
        buffer: int = 1,
        rate: Literal["share", "raw"] = "share",
        statistics: Collection[str] = STATISTICS,
        run_dir: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(strategy, statistics)
        scheme = parse_scheme(sync)
        if scheme.load.follows_speed or scheme.period is not None:
            raise ConfigError(
                f"Asynchronous gives all nodes equal work and takes only its sync from {scheme.name}: use ssp, dssp,"
                " asp, grouped or bsp, or LoadBalanced for sizes by speed"
            )
        self.scheme, self.clock, self.sleep = scheme, clock, sleep
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.buffer, self.rate = buffer, rate
        # Refuses a wrong buffer or rate before any node gets a message.
        AsynchronousRounds(Unbounded(), 1, 1, buffer=buffer, rate=rate)

    def summary(self) -> None:
        """Log the configuration of the wrapped strategy and of this wrapper."""
        super().summary()
        _log.info("\t└──> evenstep: %s without rounds, %d replies for an update", self.scheme.name, self.buffer)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: `start` does not call it, only the rounds of a strategy around this one do.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "Asynchronous has no rounds, and the strategy around it has: let Asynchronous wrap the other strategy,"
            " not the other way round"
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train until the nodes have done the work of `num_rounds` rounds of all nodes.

        Arguments as in `Strategy.start`; a node leaves after `timeout` seconds without a reply, or never if it is None.

        Raises:
            ConfigError: The nodes cannot be grouped as the scheme says.
        """
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        config = ConfigRecord() if train_config is None else train_config
        run = _FlowerRun(self, grid, initial_arrays, config)
        run.train(num_rounds, math.inf if timeout is None else timeout, result, evaluate_fn)
        messages = run.evaluation(num_rounds, evaluate_config or ConfigRecord())
        replies = grid.send_and_receive(messages, timeout=timeout) if messages else []
        metrics = self.aggregate_evaluate(num_rounds, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[num_rounds] = metrics
        return result


@final
class _Listed(View):
    """The same grid with a fixed list of nodes, for strategies that need a number of nodes to make a message."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        super().__init__(grid)
        self.nodes = nodes

    get_nodes = Grid.get_nodes  # Of the ids below.

    def get_node_ids(self) -> Iterable[int]:
        """These nodes."""
        return list(self.nodes)


@final
class _FlowerRun:
    """One training run by the decisions of `AsynchronousRounds`, with an event log, if there is a run directory.

    In the log, a piece of work has batch size times steps in the config as its samples; a missing value counts as 1.

    Attributes:
        first: The nodes at the start, when the strategy had enough nodes.
    """

    def __init__(self, wrapper: Asynchronous, grid: Grid, arrays: ArrayRecord, config: ConfigRecord) -> None:
        self._wrapper, self._strategy, self._clock = wrapper, wrapper.strategy, wrapper.clock
        self._arrays, self._config, self._grid = arrays, config, grid
        self._exchange = Exchange(grid, wrapper.clock, wrapper.sleep)
        self._round, self._before = 1, ConfigRecord({**config})
        messages = list(self._strategy.configure_train(1, arrays, config, grid))
        if not messages:
            raise ConfigError("the strategy trains on no node: give it a fraction_train above 0")
        self.first = list(grid.get_node_ids())
        self._listed = _Listed(grid, self.first)
        self._content: RecordDict | None = messages[0].content
        self._base: dict[int, ArrayRecord] = {}  # The model that each node trains on.
        self._replies: dict[tuple[int, int], tuple[Message, ArrayRecord]] = {}
        self._number: dict[int, int] = {}
        size, steps = config.get(BATCH_SIZE), config.get(STEPS)
        self._samples = (size if isinstance(size, int) else 1) * (steps if isinstance(steps, int) else 1)
        self._events = RunLog(
            wrapper.run_dir, wrapper.scheme.name, samples=self._samples, nodes=len(self.first), clock=wrapper.clock
        )
        self._ignored: set[int] = set()  # Nodes that are away for too long, until they reply.

    def evaluation(self, number: int, config: ConfigRecord) -> list[Message]:
        """The strategy's evaluation messages, for the nodes that are present and have replied.

        A vanished node keeps its place in the list, so that the strategy does not wait for another one.
        """
        present = list(self._grid.get_node_ids())
        gone = [node for node in self.first if node not in present][: max(len(self.first) - len(present), 0)]
        listed = _Listed(self._grid, present + gone)
        without = self._exchange.away.union(gone)
        messages = self._strategy.configure_evaluate(number, self._arrays, config, listed)
        return [message for message in messages if message.metadata.dst_node_id not in without]

    def train(
        self,
        number: int,
        timeout: float,
        result: Result,
        evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        """Train until the nodes have done the work of that many rounds of all, and fill in the result."""
        asked, nodes = self._wrapper, len(self.first)
        rounds = AsynchronousRounds(asked.scheme.sync, nodes, number, buffer=asked.buffer, rate=asked.rate)
        self._rounds = rounds
        self._result, self._evaluate, self._evaluated = result, evaluate, -1
        self._evaluate_up_to(0)
        looked = -_MEMBERS_EVERY
        try:
            while not rounds.done:
                replies = self._exchange.receive()
                for reply in replies:
                    self._take(reply)
                now = self._clock()
                if now - looked >= _MEMBERS_EVERY:
                    looked = now
                    # An update may evaluate for a long time, in which other replies arrive.
                    self._members(math.inf if replies else timeout)
                    if rounds.given_up:
                        _log.warning("training ends early: no node has sent a usable reply in %d tries each", number)
                        break
                self._exchange.pause(bool(replies))
            self._carry(rounds.finish(self._clock()))
            self._evaluate_up_to(number)
        finally:
            self._events.close()

    def _members(self, timeout: float) -> None:
        """Let new nodes join, and remove nodes that have vanished or are away for longer than the timeout."""
        present, known, now = set(self._grid.get_node_ids()), self._rounds.nodes, self._clock()
        for asked, node, seconds in self._exchange.open_since():
            if node in known and node in present and seconds > timeout:
                _log.warning("node %d has been away for %.0f s: training goes on without it", node, seconds)
                self._ignored.add(node)
                self._leave(node, "was away for too long")
            elif node not in present:
                self._exchange.forget(asked)
                self._ignored.discard(node)
        for node in sorted(known - present):
            _log.warning("node %d has vanished: training goes on without it", node)
            self._leave(node, "has vanished")
        for node in sorted(present - known - self._ignored):
            _log.info("node %d takes part", node)
            self._carry(self._rounds.join(node, now))

    def _leave(self, node: int, why: str) -> None:
        self._events.left(node, why)
        self._base.pop(node, None)
        self._carry(self._rounds.leave(node, self._clock()))

    def _take(self, reply: Reply) -> None:
        node, message, now = reply.node, reply.message, self._clock()
        if node in self._ignored or node not in self._rounds.nodes:
            self._ignored.discard(node)  # It joins again at the next query of the nodes.
            return
        if message.has_error():
            _log.warning("node %d failed: %s", node, message.error.reason)
            self._leave(node, message.error.reason)
            return
        self._events.replied(node, reply.away, said_seconds(message))
        base = self._base.pop(node)
        if not self._wrapper.usable(message, self._arrays):
            self._carry(self._rounds.reply(node, 0, now))
            return
        taken_seconds(message.content)
        self._replies[node, self._number[node]] = message, base
        examples = max(round(examples_of(message.content, self._wrapper.weight_key)), 1)
        self._carry(self._rounds.reply(node, examples, now))

    def _carry(self, step: Step) -> None:
        for update in step.updates:
            self._update(update)
        if step.start:
            self._send(step.start)

    def _update(self, update: tuple[Counted, ...]) -> None:
        """Let the strategy aggregate these replies, as changes of the newest model."""
        version = self._rounds.version
        messages = []
        for each in update:
            message, base = self._replies.pop((each.node, each.number))
            message.content = rebased(message.content, base, self._arrays, each.factor, self._wrapper.statistics)
            self._events.counted(each.node, each.stale, each.behind)
            messages.append(message)
        if self._content is None:  # Strategies with momentum store the current model here.
            self._configured(self._round)
        arrays, metrics = self._strategy.aggregate_train(version, of_one_form(messages))
        self._events.updated(len(update) * self._samples)
        stale = ", ".join(f"{each.node} ({each.stale} behind)" for each in update)
        _log.info("update %d: of %s", version, stale)
        if arrays is not None:
            self._arrays = self._result.arrays = with_types(arrays, self._arrays)
            self._content = None
        if metrics is not None:
            self._result.train_metrics_clientapp[version] = metrics
        self._evaluate_up_to(int(self._rounds.progress + 1e-6))

    def _send(self, nodes: tuple[int, ...]) -> None:
        if self._content is None:
            # Clients schedule their rates by round, and `num_rounds` counts rounds, not updates.
            self._content = self._configured(int(self._rounds.progress + 1e-6) + 1)
        messages = [Message(self._content, node, MessageType.TRAIN) for node in nodes]
        for node in nodes:
            self._base[node] = self._arrays
            self._number[node] = self._number.get(node, -1) + 1
        self._events.sent(dict.fromkeys(nodes, self._samples))
        sent = self._exchange.send(messages)
        for node in set(nodes) - set(sent.values()):
            _log.warning("the SuperLink did not take the message for node %d", node)
            self._leave(node, "could not be sent a message")

    def _configured(self, number: int) -> RecordDict:
        """The strategy's records for a node in this round; those that change the config in place do so once a round."""
        if number > self._round:
            self._round, self._before, config = number, ConfigRecord({**self._config}), self._config
        else:
            config = ConfigRecord({**self._before})
        return next(iter(self._strategy.configure_train(number, self._arrays, config, self._listed))).content

    def _evaluate_up_to(self, number: int) -> None:
        if self._evaluate is None or number <= self._evaluated:
            return
        self._evaluated = number
        metrics = self._evaluate(number, self._arrays)
        if metrics is not None:
            _log.info("after %d rounds' worth: %s", number, metrics)
            self._result.evaluate_metrics_serverapp[number] = metrics

"""One training without rounds: carries out the decisions of `AsynchronousRounds` with Flower's messages."""

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import AsynchronousRounds, Counted, Step
from evenstep.integrations._flower_grid import Exchange, Pause, Reply, View
from evenstep.integrations._flower_log import RunLog
from evenstep.integrations._flower_records import (
    BATCH_SIZE,
    STEPS,
    examples_of,
    of_one_form,
    rebased,
    said_seconds,
    taken_seconds,
    with_types,
)
from evenstep.integrations._flower_wrapper import Wrapper

_MEMBERS_EVERY: Final = 1.0
"""Seconds between two queries of the connected nodes."""

_log = logging.getLogger("flwr")


@final
class _Listed(View):
    """The same grid with a fixed list of nodes, for strategies that need a number of nodes to make a message."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        super().__init__(grid)
        self.nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        """These nodes."""
        return list(self.nodes)


@final
class Run:
    """One training, by the decisions of `AsynchronousRounds`.

    Attributes:
        first: The nodes at the start, when the strategy had the number of nodes that it needs.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        grid: Grid,
        arrays: ArrayRecord,
        config: ConfigRecord,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._wrapper, self._strategy, self._clock, self._sleep = wrapper, wrapper.strategy, clock, sleep
        self._arrays, self._config = arrays, config
        self._exchange = Exchange(grid, clock)
        self._grid = grid
        messages = list(self._strategy.configure_train(1, arrays, config, grid))
        if not messages:
            raise ConfigError("the strategy trains on no node: give it a fraction_train above 0")
        self.first = list(grid.get_node_ids())
        self._listed = _Listed(grid, self.first)
        self._content: RecordDict | None = messages[0].content
        self._base: dict[int, ArrayRecord] = {}  # The model that each node trains on.
        self._replies: dict[tuple[int, int], tuple[Message, ArrayRecord]] = {}
        self._number: dict[int, int] = {}
        self._events: RunLog | None = None
        self._samples = 0
        self._ignored: set[int] = set()  # Away for too long, until they reply.

    def write_to(self, folder: Path, scheme: str) -> None:
        """Write an event log. Samples are batch size times steps of the config; a missing one counts as 1."""
        size, steps = self._config.get(BATCH_SIZE), self._config.get(STEPS)
        self._samples = (size if isinstance(size, int) else 1) * (steps if isinstance(steps, int) else 1)
        self._events = RunLog(folder, scheme, samples=self._samples, nodes=len(self.first), clock=self._clock)

    def evaluation(self, number: int, config: ConfigRecord) -> list[Message]:
        """The strategy's messages of evaluation, for the nodes that are present and have replied.

        A node that has vanished fills its place in the list, so that the strategy does not wait for another one.
        """
        present = list(self._grid.get_node_ids())
        gone = [node for node in self.first if node not in present][: max(len(self.first) - len(present), 0)]
        listed = _Listed(self._grid, present + gone)
        without = self._exchange.away.union(gone)
        messages = self._strategy.configure_evaluate(number, self._arrays, config, listed)
        return [message for message in messages if message.metadata.dst_node_id not in without]

    def train(
        self,
        rounds: AsynchronousRounds,
        number: int,
        timeout: float,
        result: Result,
        evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        """Train until the rounds are done, and fill in the result."""
        pause = Pause(self._sleep)
        self._rounds, self._result, self._evaluate, self._evaluated = rounds, result, evaluate, -1
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
                    # An update may evaluate for long, and other replies have come since then.
                    self._members(math.inf if replies else timeout)
                    if rounds.given_up:
                        _log.warning("training ends early: no node has sent a usable reply in %d tries each", number)
                        break
                pause.after(bool(replies))
            self._carry(rounds.finish(self._clock()))
            self._evaluate_up_to(number)
        finally:
            if self._events is not None:
                self._events.close()

    def _members(self, timeout: float) -> None:
        """Let new nodes join, and nodes leave that have vanished or are away for longer than the timeout."""
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
        if self._events is not None:
            self._events.left(node, why)
        self._base.pop(node, None)
        self._carry(self._rounds.leave(node, self._clock()))

    def _take(self, reply: Reply) -> None:
        node, message, now = reply.node, reply.message, self._clock()
        if node in self._ignored or node not in self._rounds.nodes:
            self._ignored.discard(node)  # It joins at the next query of the nodes.
            return
        if message.has_error():
            _log.warning("node %d failed: %s", node, message.error.reason)
            self._leave(node, message.error.reason)
            return
        if self._events is not None:
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
            if self._events is not None:
                self._events.counted(each.node, each.stale, each.behind)
            messages.append(message)
        if self._content is None:  # Strategies with momentum store the present model here.
            list(self._strategy.configure_train(version, self._arrays, self._config, self._listed))
        arrays, metrics = self._strategy.aggregate_train(version, of_one_form(messages))
        if self._events is not None:
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
            # Clients schedule their rates by the round: of these, not of the updates, there are `num_rounds`.
            number = int(self._rounds.progress + 1e-6) + 1
            given = self._strategy.configure_train(number, self._arrays, self._config, self._listed)
            self._content = next(iter(given)).content
        messages = [Message(self._content, node, MessageType.TRAIN) for node in nodes]
        for node in nodes:
            self._base[node] = self._arrays
            self._number[node] = self._number.get(node, -1) + 1
        if self._events is not None:
            self._events.sent(dict.fromkeys(nodes, self._samples))
        sent = self._exchange.send(messages)
        for node in set(nodes) - set(sent.values()):
            _log.warning("the SuperLink did not take the message for node %d", node)
            self._leave(node, "could not be sent a message")

    def _evaluate_up_to(self, number: int) -> None:
        if self._evaluate is None or number <= self._evaluated:
            return
        self._evaluated = number
        metrics = self._evaluate(number, self._arrays)
        if metrics is not None:
            _log.info("after %d rounds' worth: %s", number, metrics)
            self._result.evaluate_metrics_serverapp[number] = metrics

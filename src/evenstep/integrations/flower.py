"""Flower: rounds in which nodes of different speeds finish together, and training without rounds.

    from evenstep.integrations.flower import Asynchronous, LoadBalanced, measured

    strategy = LoadBalanced(FedAvg())                      # in the ServerApp, or
    strategy = Asynchronous(FedAvg(), "dssp:lower=3,upper=15")
    app = ClientApp(mods=[measured])                       # in the ClientApp

Both wrap a strategy, like Flower's own wrappers for differential privacy. Nothing here imports PyTorch.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Literal, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import Mode, RoundTimes, RoundWork, Work, staleness_factor
from evenstep.core.rounds.times import required_patience
from evenstep.core.shown import shown
from evenstep.integrations._flower_asynchronous import Asynchronous
from evenstep.integrations._flower_grid import Exchange, Reply, Rounds
from evenstep.integrations._flower_log import RunLog
from evenstep.integrations._flower_records import (
    BATCH_SIZE,
    RATE,
    SECONDS,
    STATISTICS,
    STEPS,
    config_of,
    mean_work,
    measured,
    of_one_form,
    rebased,
    said_seconds,
    taken_seconds,
    with_types,
    with_work,
)
from evenstep.integrations._flower_wrapper import Wrapper
from evenstep.schemes import Scheme, parse_scheme
from evenstep.schemes.scheme import one_of

__all__ = ["BATCH_SIZE", "RATE", "SECONDS", "STATISTICS", "STEPS", "Asynchronous", "LoadBalanced", "measured"]

_log = logging.getLogger("flwr")


@final
class LoadBalanced(Wrapper):
    """Wraps a strategy so that each node trains with its own batch size: slow nodes with smaller ones (LB-BSP).

    The number of local steps and the learning rate remain the strategy's, equal for all nodes (TCC'21's federated
    algorithm). The mean batch size of a round is the `batch-size` of the training config. A client must take a fixed
    number of steps: in a loop over its whole dataset, a smaller batch would mean more steps. A node whose time does not
    follow its size gets at least the mean, and the log says so.

    Args:
        strategy: Decides everything except the nodes' work.
        load: The scheme that sets the sizes: `lb-bsp` with its parameters, `bsp` for equal sizes, or a `Scheme`.
        mode: `batch`; or the paper's alternatives: `steps`, where each node's `steps` follow its speed instead
            (adaptive tau), and `batch-and-lr`, where its `lr` follows its batch size.
        patience: A round waits at most this many times the predicted seconds of its slowest node. None: it waits for
            all replies, up to the timeout.
        late: A reply that comes after its round counts in the `next` one by its staleness, or is dropped (`drop`).
            Until the reply comes, its node gets no other work.
        statistics: Parts of the names of arrays that are statistics of the data, which late replies shift to theirs.
        run_dir: The folder for the events that `evenstep report` reads.
        clock: Returns seconds, such as `time.monotonic`.
        sleep: Waits for this many seconds.

    Raises:
        ConfigError: An option or the scheme is unknown, the scheme has more than sizes for nodes that come and go, or
            this is not a strategy that can be wrapped.
    """

    def __init__(
        self,
        strategy: Strategy,
        load: Scheme | str = "lb-bsp",
        *,
        mode: Mode = "batch",
        patience: float | None = None,
        late: Literal["next", "drop"] = "next",
        statistics: Collection[str] = STATISTICS,
        run_dir: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        one_of("late", late, ("next", "drop"))
        super().__init__(strategy, statistics)
        scheme = parse_scheme(load)
        if scheme.served is not None or scheme.period is not None:
            raise ConfigError(
                f"LoadBalanced has rounds and takes only the sizes from {scheme.name}: use lb-bsp or bsp, or"
                " Asynchronous for training without rounds"
            )
        self._name = scheme.name
        self._mode: Mode = mode
        self._work, self._times = RoundWork(scheme.load, mode), RoundTimes()
        self._named: set[int | str] = set()  # Nodes without seconds, and "flat", of which the log has told.
        self._patience = required_patience(patience)
        self._clock, self._sleep = clock, sleep
        self._late, self._round = late, 0
        self._plan: dict[int, Work] = {}
        self._begun: dict[int, tuple[int, ArrayRecord, Work]] = {}  # Round, model and work of the nodes that train.
        self._away: dict[str, float] = {}  # Seconds between message and reply, by message id.
        self._arrays = ArrayRecord()
        self._rounds: Rounds | None = None
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._events = RunLog(None, self._name, samples=1, nodes=1, clock=clock)

    def summary(self) -> None:
        """Log the configuration of the wrapped strategy and of this wrapper."""
        super().summary()
        _log.info("\t└──> evenstep: %s of %s", "steps" if self._mode == "steps" else "batch sizes", self._name)

    def start(self, grid: Grid, *args: object, **options: object) -> Result:
        """Like `Strategy.start`; a round ends with its last reply or after `patience`."""
        exchange = Exchange(grid, self._clock, self._sleep)
        self._rounds = Rounds(exchange, limit=self._limit, arrived=self._arrived, ended=self._ended)
        try:
            return super().start(self._rounds, *args, **options)
        finally:
            self._rounds = None
            self._events.close()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, each with the work of its node; nodes that still train get none.

        Raises:
            ConfigError: The config lacks a number that the mode needs.
        """
        if self._rounds is None and (self._patience is not None or self._run_dir is not None):
            raise ConfigError(
                "patience and run_dir need the rounds of LoadBalanced.start: let LoadBalanced wrap the other strategy,"
                " not the other way round"
            )
        if server_round > 1:
            arrays = with_types(arrays, self._arrays)
        away = self._rounds.exchange.away if self._rounds else set()
        asked = list(self.strategy.configure_train(server_round, arrays, config, grid))
        mean = mean_work(config_of(asked, config), self._mode)
        messages = [each for each in asked if each.metadata.dst_node_id not in away]
        self._round = server_round
        # Models of replies that have arrived are not kept.
        self._begun = {node: begun for node, begun in self._begun.items() if node in away}
        self._away.clear()
        self._plan = self._work.plan([each.metadata.dst_node_id for each in messages], mean.batch_size, mean.steps)
        self._name_flat()
        for message in messages:
            node = message.metadata.dst_node_id
            message.content = with_work(message.content, self._plan[node], self._mode)
            self._begun[node] = server_round, arrays, self._plan[node]
        self._arrays = arrays
        if self._rounds is not None:
            self._rounds.training = True
            if server_round == 1:
                self._events = RunLog(
                    self._run_dir, self._name, samples=mean.samples, nodes=len(self._plan), clock=self._clock
                )
            self._events.sent({node: work.samples for node, work in self._plan.items()})
        if self._plan:
            given = {
                node: work.steps if self._mode == "steps" else work.batch_size for node, work in self._plan.items()
            }
            least, most = min(given, key=given.__getitem__), max(given, key=given.__getitem__)
            what = "steps" if self._mode == "steps" else "batch sizes"
            _log.info("configure_train: %s %d (node %d) to %d (node %d)", what, given[least], least, given[most], most)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Learn the nodes' speeds, and let the wrapped strategy aggregate the usable replies without the seconds."""
        replies = list(replies)
        usable = [reply for reply in replies if not reply.has_error() and self.usable(reply, self._arrays)]
        usable = of_one_form(usable)
        self._learn(usable)
        for reply in usable:
            self._count(reply)
        nodes = [reply.metadata.src_node_id for reply in usable]
        self._events.updated(sum(self._begun[node][2].samples for node in nodes if node in self._begun))
        failed = [reply for reply in replies if reply.has_error()]
        arrays, metrics = self.strategy.aggregate_train(server_round, failed + usable)
        return None if arrays is None else with_types(arrays, self._arrays), metrics

    def _name_flat(self) -> None:
        """Log once if some nodes' times do not follow their work."""
        if not self._work.flat or "flat" in self._named:
            return
        self._named.add("flat")
        _log.warning(
            "the time of %s does not follow the %s, so such nodes get at least the mean: a client must take `steps`"
            " steps of `batch-size` samples, and not go through all of its data",
            ", ".join(f"node {node}" for node in sorted(self._work.flat)),
            "steps" if self._mode == "steps" else "batch size",
        )

    def _learn(self, replies: list[Message]) -> None:
        """Learn the nodes' speeds, and remove the seconds from these usable replies."""
        away = [self._away.pop(reply.metadata.reply_to_message_id, None) for reply in replies]
        told = {
            reply.metadata.src_node_id: (said, seconds)
            for reply, seconds in zip(replies, away, strict=True)
            if seconds is not None and seconds > 0.0 and (said := said_seconds(reply)) > 0.0
        }
        self._times.observe(told)  # All first, since the bounds follow from their median.
        for reply, seconds in zip(replies, away, strict=True):
            node, taken = reply.metadata.src_node_id, taken_seconds(reply.content)
            if node in self._begun:  # Without a message from here, a node's work is not known.
                self._learn_from(node, self._begun[node][2], taken, seconds)

    def _learn_from(self, node: int, work: Work, seconds: object, away: float | None) -> None:
        """Learn from the seconds that a node reports for its work."""
        if seconds is None:
            if node not in self._named:
                self._named.add(node)
                _log.warning("node %d sends no %s: give its ClientApp mods=[measured]", node, SECONDS)
        elif not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:
            _log.warning("node %d says that it has trained for %s seconds, which is left out", node, shown(seconds))
        else:
            counted = self._times.bounded(float(seconds), away)
            if away is not None and not 0.5 <= counted / seconds <= 2.0:
                why = f"it was away for {away:.3g} s"
                _log.warning("node %d says %.3g s, which count as %.3g: %s", node, seconds, counted, why)
            self._work.observe(node, work, counted)

    def _count(self, reply: Message) -> None:
        """Give a usable reply its weight and, if it is late, rebase it on the current model."""
        node = reply.metadata.src_node_id
        if node not in self._begun:
            return
        number, old, _ = self._begun[node]
        late = self._round - number
        self._events.counted(node, late, float(late))
        if late:
            _log.info("the reply of node %d to round %d counts in round %d", node, number, self._round)
            factor = staleness_factor(late)
            reply.content = rebased(reply.content, old, self._arrays, factor, self.statistics)

    # Callbacks of `Rounds`.

    def _limit(self) -> float | None:
        return self._times.deadline(self._work.seconds(self._plan), self._patience)

    def _arrived(self, reply: Reply) -> bool:
        """Record how long the node was away; returns whether its reply counts."""
        number = self._begun[reply.node][0]
        said = said_seconds(reply.message)
        away = max(
            reply.away - reply.unseen, min(said, reply.away)
        )  # Of what is possible, the nearest to what is said.
        if reply.message.has_error():
            self._events.left(reply.node, reply.message.error.reason)
        else:
            self._events.replied(reply.node, away, said)
        self._away[reply.asked] = away
        if self._late == "next" or number == self._round or reply.message.has_error():
            return True
        _log.warning("the reply of node %d to round %d is too late, and is dropped", reply.node, number)
        if self.usable(reply.message, self._arrays):
            self._learn([reply.message])
        return False

    def _ended(self, without: set[int]) -> None:
        for node in sorted(without):
            _log.warning("round %d goes on without node %d, whose reply is late", self._round, node)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Like the wrapped strategy; nodes that still train get no message."""
        away = self._rounds.exchange.away if self._rounds else set()
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return [message for message in messages if message.metadata.dst_node_id not in away]

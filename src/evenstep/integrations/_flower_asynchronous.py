"""Flower without rounds: each node gets the newest model as soon as the sync policy allows."""

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
from evenstep.core.rounds import AsynchronousRounds
from evenstep.core.sync import Unbounded
from evenstep.integrations._flower_records import STATISTICS
from evenstep.integrations._flower_run import Run
from evenstep.integrations._flower_wrapper import Wrapper
from evenstep.schemes import Scheme

_log = logging.getLogger("flwr")


@final
class Asynchronous(Wrapper):
    """Wraps a strategy so that nodes do not wait for each other, or only within the bound of `sync`.

    `start` replaces the loop over rounds: a node that has replied gets the newest model as soon as the sync policy
    allows. The wrapped strategy aggregates the replies of each update, as changes of the model times their factors;
    `AsynchronousRounds` has the equations. What the strategy puts into its messages must be the same for all nodes.
    Every node takes part: `fraction_train` chooses none. `server-round` in a message is the progress in rounds' worth,
    plus one.

    A node that vanishes, fails or is away for longer than the timeout leaves, and joins again when it is back. A reply
    that cannot be used changes nothing. Nodes evaluate once, at the end; `evaluate_fn` is called after every round's
    worth.

    Args:
        strategy: The strategy, which makes the messages and aggregates the replies of each update.
        sync: `asp`, `ssp:bound=3`, `dssp:lower=3,upper=15`, `grouped:groups=4`, or another scheme with equal sizes that
            bounds the lead of a worker. An iteration is a piece of a node's work.
        buffer: The least number of replies of an update. With `asp` this is FedBuff.
        rate: `share`: by the node's share of all examples and its rounds behind. `raw`: FedBuff's.
        statistics: Parts of the names of arrays that are statistics of the data: these are averaged. Changes of other
            arrays are added.
        run_dir: The folder for the events that `evenstep report` reads.
        clock: In seconds, such as `time.monotonic`.
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
        scheme = self.scheme(sync)
        if scheme.load.follows_speed or scheme.period is not None:
            raise ConfigError(
                f"Asynchronous gives all nodes equal work and takes only its sync from {scheme.name}: use ssp, dssp,"
                " asp, grouped or bsp, or LoadBalanced for sizes by speed"
            )
        self._name, self._sync = scheme.name, scheme.sync
        self._buffer, self._rate = buffer, rate
        self._clock, self._sleep = clock, sleep
        self._run_dir = None if run_dir is None else Path(run_dir)
        # Refuses a wrong buffer or rate before a node gets a message.
        AsynchronousRounds(Unbounded(), 1, 1, buffer=buffer, rate=rate)

    def summary(self) -> None:
        """Log the configuration of the wrapped strategy and of this wrapper."""
        super().summary()
        _log.info("\t└──> evenstep: %s without rounds, %d replies for an update", self._name, self._buffer)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not called by `start`, but by the rounds of a strategy around this one.

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

        Args:
            grid: As in `Strategy.start`.
            initial_arrays: As there.
            num_rounds: As there.
            timeout: Seconds after which a node that has not replied leaves. None: it does not.
            train_config: As there.
            evaluate_config: As there.
            evaluate_fn: As there.

        Raises:
            ConfigError: The nodes cannot be grouped as the scheme says.
        """
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        config = ConfigRecord() if train_config is None else train_config
        run = Run(self, grid, initial_arrays, config, clock=self._clock, sleep=self._sleep)
        rounds = AsynchronousRounds(self._sync, len(run.first), num_rounds, buffer=self._buffer, rate=self._rate)
        if self._run_dir is not None:
            run.write_to(self._run_dir, self._name)
        run.train(rounds, num_rounds, math.inf if timeout is None else timeout, result, evaluate_fn)
        messages = run.evaluation(num_rounds, evaluate_config or ConfigRecord())
        replies = grid.send_and_receive(messages, timeout=timeout) if messages else []
        metrics = self.aggregate_evaluate(num_rounds, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[num_rounds] = metrics
        return result

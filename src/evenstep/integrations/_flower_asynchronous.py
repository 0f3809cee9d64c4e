"""Flower without rounds: each node gets the newest model when the sync policy lets it run."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, final

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import AsynchronousRounds
from evenstep.core.sync import Unbounded
from evenstep.integrations._flower_run import Run
from evenstep.integrations._flower_wrapper import Wrapper
from evenstep.schemes import Scheme

_log = logging.getLogger("flwr")


@final
class Asynchronous(Wrapper):
    """Wraps a strategy so that no node waits for another, or only as far as `sync` says.

    `start` replaces the loop over rounds: a node that has replied gets the newest model as soon as the sync policy lets
    it run. The replies of an update, as changes of the model times their factor, are what the wrapped strategy
    aggregates; `AsynchronousRounds` has the equations. What the strategy puts into its messages must be alike for all
    nodes. Every node takes part; `fraction_train` chooses none of them.

    A node that vanishes, fails or is away for longer than the timeout leaves, and joins again when it is back. A reply
    with a NaN changes nothing. Nodes evaluate once, at the end; `evaluate_fn` is called after every round's worth.

    Args:
        strategy: Makes the messages, and aggregates the replies of each update.
        sync: `asp`, `ssp:bound=3`, `dssp:lower=3,upper=15`, `grouped:groups=4` or another scheme that says how far one
            may run ahead; each piece of a node's work is an iteration.
        buffer: An update has at least this many replies. With `asp` that is FedBuff.
        rate: `share`: by the node's share of all examples, and by rounds behind. `raw`: FedBuff's.
        run_dir: Where to write the events that `evenstep report` reads.
        clock, sleep: Of seconds.

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
        run_dir: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(strategy)
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
        self._key: str = getattr(strategy, "weighted_by_key", "num-examples")
        # Refuses what cannot work, before a node is asked.
        AsynchronousRounds(Unbounded(), 1, 1, buffer=buffer, rate=rate)

    def summary(self) -> None:
        """Log the wrapped strategy's configuration, and this one's."""
        super().summary()
        _log.info("\t└──> evenstep: %s without rounds, %d replies for an update", self._name, self._buffer)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train for as much work as `num_rounds` rounds of all nodes have.

        Args:
            grid: As in `Strategy.start`.
            initial_arrays: As there.
            num_rounds: As there.
            timeout: A node that is away for longer leaves, in seconds.
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
        run = Run(self.strategy, grid, initial_arrays, config, key=self._key, clock=self._clock, sleep=self._sleep)
        rounds = AsynchronousRounds(self._sync, len(run.first), num_rounds, buffer=self._buffer, rate=self._rate)
        if self._run_dir is not None:
            run.write_to(self._run_dir, self._name)
        run.train(rounds, num_rounds, timeout, result, evaluate_fn)
        messages = self.configure_evaluate(num_rounds, result.arrays, evaluate_config or ConfigRecord(), grid)
        there = [message for message in messages if message.metadata.dst_node_id not in run.away]
        replies = grid.send_and_receive(there, timeout=timeout) if there else []
        metrics = self.aggregate_evaluate(num_rounds, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[num_rounds] = metrics
        return result

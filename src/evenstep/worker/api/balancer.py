"""`evenstep.Balancer`: uneven shares behind a barrier, for a training loop of any framework."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError
from evenstep.core.fragments import due_fragments, weights_of
from evenstep.core.samples import WEIGHTINGS, Ledger, Shares
from evenstep.core.samples import Share as Part
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.worker.activity import Activity
from evenstep.worker.api.gather import AllGather, Gather
from evenstep.worker.api.loop import Loop, seconds_of
from evenstep.worker.api.setup import Asked
from evenstep.worker.api.share import Share
from evenstep.worker.iteration import units_of
from evenstep.worker.meter import COLUMNS, Rows
from evenstep.worker.nonfinite import NonfiniteGuard


@final
class Balancer(Loop):
    """This worker's shares of each epoch, sized so that all workers take equally long to compute.

        balancer = evenstep.Balancer(
            "lb-bsp", rank=r, workers=n, all_gather=fn, length=len(data), global_batch_size=512
        )
        for share in balancer.epoch(0):
            with balancer.compute():
                gradient = ...                      # of the mean loss over data[share.indices]
            gradient = sum_over_workers(gradient * share.weight)
            ...                                     # the optimizer's step

    All workers make the same calls. Each position of an epoch is in exactly one worker's share, and the sum of the
    weighted gradients is the gradient of the union batch. Nothing here imports a framework.

    Under `local-sgd` each worker steps on its own gradient, and the loop averages, which it says by `averages=True`:

            ...                                     # the optimizer's step, on this worker's gradient
            if share.average is not None:
                weights = sum_over_workers(weights * share.average)     # and the optimizer's state

    Args:
        scheme: A scheme without parameter servers: `"lb-bsp"`, `"dbs:minimum=4"`, or what a recipe returns. None: the
            scheme of `evenstep run`, else `lb-bsp`.
        rank: This worker, 0 to `workers` - 1.
        workers: The number of workers.
        all_gather: `fn(row: bytes) -> list[bytes]`, any all-gather: it returns the rows of all workers by rank. Within
            a call all rows have the same length. It is called a few times here, and then once in each iteration, at
            the end of compute. It should raise an error if a worker does not come.
        length: Samples in an epoch.
        global_batch_size: Samples in one iteration, over all workers.
        drop_last: Leave out a last iteration of fewer samples.
        shuffle: Whether `share.indices` is in a new random order in each epoch; otherwise it equals the positions.
        seed: The seed of that order.
        smallest_batch: The smallest share that a worker can compute on; 2 for models with batch normalisation.
        largest_batch: The largest share that this worker's memory holds, if it is known.
        averages: Whether the loop averages the weights where `share.average` says so, as `local-sgd` needs.
        run_dir: Folder to which each worker writes its events, for `evenstep report` and `top`.

    Raises:
        ConfigError: Something asked for cannot work on this worker or on another, which is named; or the all-gather
            returned anything but the rows of all workers.
        DisagreementError: The workers were started with different schemes, lengths, sizes or seeds.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        rank: int,
        workers: int,
        all_gather: AllGather | None = None,
        length: int,
        global_batch_size: int,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        smallest_batch: int = 1,
        largest_batch: int | None = None,
        averages: bool = False,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        asked = Asked.of(
            LaunchSettings.from_environment(os.environ),
            partial(_check, averages=averages),
            scheme=scheme,
            rank=rank,
            workers=workers,
            length=length,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            smallest_batch=smallest_batch,
            largest_batch=largest_batch,
            run_dir=run_dir,
        )
        worker = asked.worker
        if all_gather is None and asked.workers > 1:
            raise ConfigError(
                f"{asked.workers} workers need a way to each other: start every worker with all_gather, a function from"
                " this worker's row to the rows of all"
            )
        self._gather = Gather(all_gather or (lambda row: [row]), rank=asked.rank, workers=asked.workers)
        agreed = asked.agree(self._gather.records)
        super().__init__(asked, agreed, worker, Activity())
        self._rows = Rows(self._tracker.meter, self._gather.records)
        self._weigh = WEIGHTINGS[agreed.scheme.weighting]
        self._period = agreed.scheme.period
        self._since_average = np.zeros(asked.workers, dtype=np.int64)
        self._units: float | None = None
        self._amount, self._weighed = 0.0, False  # Counted since the last exchange.
        guards = asked.workers > 1 and agreed.scheme.nonfinite != "spread"
        self._nonfinite = NonfiniteGuard(agreed.scheme.nonfinite, self._tracker) if guards else None
        self._planned: Shares | None = None
        self._due = False

    @property
    def planned(self) -> Share | None:
        """In the loop: the next share if the sizes stay as they are, for fetching ahead; None in the epoch's last."""
        part = None if self._planned is None else self._planned.share()
        return None if part is None else self._share_of(part)

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Wrap this worker's own compute of a share, once: it is timed, and ends with an exchange of all workers.

        Under `local-sgd` they exchange at the end of a period only.

        Raises:
            ConfigError: There is no current share, or its compute was reported already.
            DisagreementError: The workers are in different iterations; no gradient has been summed yet.
        """
        self._require_due()
        self._stopwatch.run()
        try:
            yield
        except BaseException:
            self._stopwatch.drop()
            raise
        self._computed()

    def report(self, seconds: float, *, finite: bool = True) -> None:
        """Report the seconds of this worker's own compute of the share, instead of `compute`; raises the same errors.

        For compute that a host's clock cannot measure, such as a device's, or that communicates meanwhile.

        Args:
            seconds: The time of the compute.
            finite: Whether the gradient holds no NaN and no infinity. If it does, the scheme's `nonfinite` decides:
                under `skip` the weight of `balancer.share` becomes 0, and a warning names this worker.

        Raises:
            NonfiniteGradientError: The gradient is not finite, and the scheme refuses that.
            DivergedError: No gradient has been finite for a long time.
        """
        seconds = seconds_of(seconds)
        self._require_due()
        self._stopwatch.add(seconds)
        self._computed(finite=finite)

    def weigh_by(self, count: float) -> None:
        """Weigh this share by its part of all workers' units (tokens, pixels, class weights), instead of samples.

        For a loss that is a mean over such units. Call it for every share, on every worker, before its compute ends.
        Then `balancer.share` has the weight, and not the share of the loop.

        Args:
            count: The units in this worker's share: what its loss is divided by.

        Raises:
            ConfigError: The count is negative or not a number, or there is no current share.
        """
        self._require_due()
        now = self._tracker.iteration
        self._units = units_of(None if now is None else now.share, count)

    def _require_due(self) -> None:
        now = self._tracker.iteration
        if now is None or not self._at.looping:
            raise ConfigError("there is no current share: report compute inside the loop over balancer.epoch()")
        if not self._due:
            raise ConfigError(
                f"the compute of iteration {now.number} was reported already: use compute() or report() once a share,"
                " around all of its micro-batches"
            )

    def _computed(self, *, finite: bool = True) -> None:
        """Exchange after the compute of the current share, unless its period goes on."""
        now, tracker = self._tracker.iteration, self._tracker
        assert now is not None
        assert self.share is not None
        if self._nonfinite is not None:
            if finite:
                self._nonfinite.passed()
            else:
                self._nonfinite.skip(now, finite=True)
                self.share = replace(self.share, weight=0.0)
        self._due = False
        self._amount += self.share.samples if self._units is None else self._units
        self._weighed |= self._units is not None
        if self._period is None:
            tracker.compute_ends()
        else:
            tracker.batch_ends()
            self._since_average += now.share.sizes
            if not due_fragments(now.share, self._period):
                return
            self._since_average[:] = 0
            now.paused = tracker.clock()
        weighed, own = self._weighed, np.float64(self._amount)
        self._amount, self._weighed = 0.0, False
        bits = int(own.view(np.int64))  # Rows hold integers.
        with tracker.waiting():
            rows = self._gather.rows(self._rows.row(now, weighed=weighed, extra=[bits]))
        assert now.paused is not None
        now.synchronised_seconds = tracker.clock() - now.paused
        amounts = self._rows.check(rows)[:, 0].copy().view(np.float64)
        tracker.mark(Doing.COMPUTING)
        if weighed:
            assert self.share is not None
            if self._period is not None:
                self.share = replace(self.share, average=float(weights_of(amounts)[self._worker.rank]))
            elif self.share.weight:  # If no worker counted any units, it is as for a loss divided by max(count, 1).
                self.share = replace(self.share, weight=float(own / (amounts.sum() or 1.0)))

    # The epoch.

    def _enter(self) -> None:
        self._tracker.enter_loader()
        self._tracker.learn()

    def _shares(self, ledger: Ledger) -> Shares:
        self._planned = self._tracker.shares(ledger, epoch=self._at.epoch, depth=0)
        return self._planned

    def _share_of(self, part: Part) -> Share:
        share = super()._share_of(part)
        if self._period is None:
            return replace(share, weight=self._weigh(part))
        samples, due = self._since_average + part.sizes, due_fragments(part, self._period)
        average = float(samples[self._worker.rank] / samples.sum()) if due else None
        return replace(share, weight=float(part.samples > 0), average=average)

    def _begin(self, part: Part) -> None:
        if self._due:
            self._tracker.take_back()  # The script only looked at it, and left its loop.
        self._tracker.batch_begins()
        super()._begin(part)
        self._stopwatch.drop()
        self._due, self._units = True, None

    def _finish(self) -> None:
        now = self._tracker.iteration
        if now is not None and self._due:
            # The other workers wait for this one at the end of their compute.
            self._gather.rows(
                [0] * (COLUMNS + 1),
                failure=f"the compute of iteration {now.number} was not reported: put it inside `with"
                " balancer.compute():`, or call balancer.report(seconds) after it",
            )

    def state_dict(self) -> dict[str, Any]:
        """Like `Loop.state_dict`; under `local-sgd` only after an average, when all workers' weights are equal.

        Raises:
            ConfigError: A period has begun and has not been averaged yet.
        """
        if self._since_average.any():
            raise ConfigError(
                "each worker's weights are its own until the next average: save between epochs, or after a share whose"
                " average is not None"
            )
        return super().state_dict()


def _check(scheme: Scheme, *, averages: bool) -> Mapping[str, Any]:
    """Refuse what a `Balancer` cannot run."""
    if scheme.served is not None:
        raise ConfigError(f"the scheme {scheme.name!r} trains on parameter servers: use evenstep.Client")
    if scheme.period is not None and not averages:
        raise ConfigError(
            f"the scheme {scheme.name!r} averages weights and not gradients: let the loop do so where share.average"
            " says it, and give averages=True, or use another scheme"
        )
    if scheme.outer is not None or scheme.steps != "equal":
        raise ConfigError(f"the steps of {scheme.name!r} run on PyTorch only: use local-sgd here")
    if scheme.micro_batch is not None:
        raise ConfigError(
            "a Balancer hands out whole shares: leave out micro_batch, cut each share as you like, and give multiple="
            " for sizes that can be cut evenly"
        )
    return {}

"""A replica that sums gradients over the members of the quorum, in steps that may not count: model and engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchft import DistributedDataParallel as OfTorchft
from torchft.process_group import ProcessGroupDummy

from evenstep.core.errors import ConfigError
from evenstep.launch.c10d import GradBucket, completed
from evenstep.schemes import Scheme
from evenstep.torch.elastic.engine import NO_BACKWARD, ElasticEngine
from evenstep.torch.elastic.quorum import BrokenQuorumError
from evenstep.torch.engines.averages import chunks, split
from evenstep.torch.engines.left_out import LeftOut
from evenstep.torch.engines.sharded import BackwardEnd, SumsShards, weigh_shards
from evenstep.torch.engines.weighting import SummedModel, weight_function
from evenstep.torch.model import is_sharded, unwrapped
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut


@final
class SummingReplica(ElasticEngine):
    """Sums weighed gradients while backward computes; the quorum is asked before an optimizer steps.

    Args:
        common: The arguments of `ElasticEngine`.
    """

    def __init__(
        self,
        *common: Any,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(*common, scheme=scheme)
        alone = replace(self.workers, rank=0, count=1)
        self._models = [SummedModel(each, alone) for each in models]
        self._sharded = [is_sharded(each) for each in models]
        self._optimizers = optimizers
        self._weight_of, _ = weight_function("samples", scheme, 1, 1)
        self._left_out = None if scheme.nonfinite == "spread" else LeftOut(scheme.nonfinite, self.tracker, self._models)
        self._works: list[Callable[[], None]] = []  # Sums under way.
        self._units: tuple[float, torch.Tensor, Callable[[], None]] | None = None
        self._weighed = False
        self._table: torch.Tensor | None = None
        """The rows of all members in this step, once they are under way."""

    def begin(self, batch: HandedOut) -> None:
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._table, self._ended, self.uncounted = None, False, 0
        self._units, self._weighed = batch.units, batch.units is not None
        assert batch.weight is not None
        for model in self._models:
            model.set(batch.weight)

    def units_of_all(self, units: float) -> tuple[float, torch.Tensor, Callable[[], None]]:
        table = self._quorum.table(torch.tensor(units, dtype=torch.float64))
        return units, table, self._quorum.sum(table)

    def weigh(self, batch: HandedOut) -> None:
        self._units, self._weighed = batch.units, True

    # The model's side.

    def _weigh_in(self) -> None:
        """Know who the members are, and by what this one's gradient is weighed, before anything is summed."""
        if self._ended:
            raise ConfigError(
                "a backward ran outside the loop over the session's loader: compute gradients of its batches alone"
            )
        if self._quorum.pending:
            with self.meeting():
                self._quorum.arrive()
        if self._units is not None:
            (units, table, wait), self._units = self._units, None
            with self.meeting():
                wait()
            total = float(table.sum()) * self.workers.count / len(table)  # Each process of a worker has its units.
            for each in self._models:
                each.set(units / (total or 1.0))

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        super().reduction_begins(model, synchronises=synchronises)
        self._models[model].forget_looks()

    def _backward_begins(self, model: int, batch: HandedOut, gradient: torch.Tensor | None) -> None:
        super()._backward_begins(model, batch, gradient)
        if self._left_out is not None and gradient is not None and gradient.dtype is not torch.float16:
            self._left_out.look_at(model, gradient.sum())

    def communicate(self, model: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Weigh a bucket of gradients and begin its sum; the last one waits for all, as DDP reads none before."""
        self._weigh_in()
        self._models[model].apply(buffer := bucket.buffer(), bucket)
        self._works.append(self._quorum.sum(buffer))
        if bucket.is_last():
            self.tracker.compute_ends()
            self._exchange()
        return completed(buffer)

    def weigh_sharded(self, model: int, gradients: torch.Tensor) -> None:
        """Weigh a sharded model's gradients in place, before they are summed inside the replica."""
        self._weigh_in()
        self._models[model].apply_whole(gradients)

    @torch.no_grad()
    def backward_ends(self, model: int) -> None:
        """Sum the gradients of a model that is split over the processes of a replica, each its own part.

        All of them, as batches may need different ones; a parameter that none needed has no gradient afterwards.
        """
        self._weigh_in()
        summed, tracker = self._models[model], self.tracker
        if self._sharded[model]:
            tracker.stopwatch.drop()  # Compute ended when the last gradients were sent inside the replica.
        tracker.compute_ends()
        parameters = summed.parameters
        used = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
        for chunk in chunks([_part(each) for each in parameters]):
            flat = torch.cat([each.reshape(-1) for each in chunk])
            if not self._sharded[model]:
                summed.apply_whole(flat)
            self._works.append(partial(_add_up, self._quorum.sum(flat), flat, chunk))
        self._works.append(self._quorum.sum(used))
        self._exchange()
        for each, count in zip(parameters, used.tolist(), strict=True):
            if not count:
                each.grad = None

    def _exchange(self) -> None:
        tracker = self.tracker
        now = tracker.iteration
        assert now is not None
        rates = [float(group["lr"]) for each in self._optimizers for group in each.param_groups if "lr" in group]
        row = torch.tensor(self._rows.row(now, weighed=self._weighed, rates=rates))
        with tracker.waiting():
            self._table = self._quorum.table(row)
            for wait in (*self._works, self._quorum.sum(self._table)):
                wait()
        self._works.clear()
        assert now.paused is not None
        now.synchronised_seconds = tracker.clock() - now.paused

    # The optimizer's side.

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        self._end_batch()
        return self.counted

    def _end_batch(self) -> None:
        """End the step, once."""
        if self._ended:
            return
        if self._table is None and not self._quorum.broken:
            raise ConfigError(NO_BACKWARD)
        batch, tracker = self.hand_outs.in_hand, self.tracker
        assert batch is not None
        try:
            if self._table is not None and self._quorum.whole():
                self._rows.check(self._table.numpy())
        except BrokenQuorumError:
            pass
        batch.closed = self._ended = True
        if not self._commit(batch):
            tracker.take_back()
        elif self._left_out is not None and self._left_out.due:
            self._left_out.before_step()


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of the gradient of this parameter, which has one from now on."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if not isinstance(parameter, DTensor):
        return parameter.grad
    gradient: Any = parameter.grad
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    part: torch.Tensor = gradient.to_local()
    return part


def _add_up(wait: Callable[[], None], flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Wait for the sum of these parts as one vector."""
    wait()
    split(flat, parts)


def whole(model: torch.nn.Module, *, alone: bool) -> torch.nn.Module:
    """The user's model without a DistributedDataParallel around it; `alone`: the replica is one process.

    Raises:
        ConfigError: It is torchft's own, whose hook would divide the gradients by the number of members; or it is
            sharded over one process, or in DistributedDataParallel inside a replica.
    """
    if isinstance(model, OfTorchft):
        raise ConfigError(
            "the model is in torchft's DistributedDataParallel, which weighs all replicas alike: pass the plain model"
        )
    if alone and is_sharded(unwrapped(model)):
        raise ConfigError(
            "a replica is one process, which has all of the model: leave out fully_shard, or start replicas of several"
            " (evenstep run --nproc-per-replica)"
        )
    if not alone and isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the gradients of a model that is split over the processes of a replica are summed here: pass it without"
            " DistributedDataParallel"
        )
    return unwrapped(model)


def summing(
    module: torch.nn.Module, reduce: Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
) -> DistributedDataParallel:
    """Return the model in a DistributedDataParallel whose buckets `reduce` takes."""
    # As torchft does: the group is not used, and with unused parameters the buckets are never arranged anew, which
    # would be different on a replica that joins later.
    replica = DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True)

    # DDP insists on these names and annotations.
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return reduce(bucket)

    def no_sync() -> None:
        raise ConfigError(
            "every backward is summed while members come and go: leave out no_sync, and step on each batch"
        )

    replica.register_comm_hook(None, hook)
    replica.__dict__["no_sync"] = no_sync
    return replica


def sum_parts(module: torch.nn.Module, engine: SumsShards, index: int, inside: Workers) -> None:
    """Make every backward sum the gradients of a model that is split over the processes of a replica."""
    if is_sharded(module):
        weigh_shards(module, engine, index, inside)
        return
    end = BackwardEnd(engine, index)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: end.await_once())  # type: ignore[no-untyped-call]

"""The local engine: workers train alone for some iterations, then average their models (local SGD, DiLoCo)."""

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.samples import Share, ends_period
from evenstep.core.workers import minority, name_workers
from evenstep.schemes import Outer, Scheme
from evenstep.tensors.messages import all_finite
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.narrow import NarrowSum
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.processes.liveness import Liveness
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.tracker import Tracker

_CHUNK_BYTES: Final = 32 * 2**20
_MIN_BYTES: Final = 4
_OUTER: Final = "outer_momentum"


@final
class LocalEngine(Engine):
    """Workers step alone and average their models every `period` iterations.

    All iterations between two averages count as one iteration for the tracker and in the event log. The average takes
    place when the script asks for the next batch, after its optimizer has stepped.
    """

    def __init__(
        self,
        workers: Workers,
        tracker: Tracker,
        liveness: Liveness | None,
        *,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(workers, tracker, liveness)
        self._period, self._outer = scheme.period_in_iterations, scheme.outer
        self._began: list[torch.Tensor] = []
        self._narrow = None
        if self._outer is not None and self._outer.wire != "float32" and workers.device_group is not None:
            self._narrow = NarrowSum(self._outer.wire, workers.device_group)
        self._nonfinite = None if scheme.nonfinite == "spread" else NonfiniteGuard(scheme.nonfinite, tracker)
        self._models = models
        self._optimizers = optimizers
        self._exchange = ReportExchange(workers, tracker.meter)
        self._units = 0.0
        self._count = 0.0
        self._weighed = False
        self._in_hand = False
        self._began_at = 0.0
        self._stepped: set[int] = set()
        if workers.device_group is not None:
            # As under DistributedDataParallel, all workers start from the model of worker 0.
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), group=workers.device_group, group_src=0)

    def enter_loader(self) -> None:
        now = self.hand_outs.in_hand
        if now is None or now.finished:
            self._end_iteration(meet=False)
        else:
            self.tracker.enter_loader(ended=False)

    def batch_ends(self) -> None:
        now = self.hand_outs.in_hand
        if now is not None and not now.finished and self._ends_period(now.piece):
            raise ConfigError(
                "the models are to be averaged after a batch whose backward has not run when the next one begins: run"
                " the backward of a batch before the forward pass of the next"
            )
        self._end_iteration(meet=False)

    def _end_iteration(self, *, meet: bool) -> None:
        """Finish the current iteration; average if `meet` is set or the period is over."""
        self.tracker.stopwatch.pause()
        now = self.tracker.iteration
        if now is not None and self._in_hand:
            self._finish()
            meet = meet or self._ends_period(now.piece)
        if now is not None and meet:
            with self.meeting(self.tracker.activity.waiting(now.number + 1)):
                self._meet(now)
        self.tracker.enter_loader()
        self.tracker.learn()

    def _ends_period(self, piece: Share) -> bool:
        return piece.last and ends_period(piece, self._period)

    def _finish(self) -> None:
        """Count the current batch, and hold the worker if slowness is emulated."""
        self._in_hand = False
        self._units += self._count
        self.tracker.batch_ends(self._began_at)

    def begin(self, batch: HandedOut) -> None:
        before, hold = self.tracker.iteration, self.tracker.hold
        goes_on = before is not None and before.paused is None
        if self._outer is not None and not goes_on:
            self._began = [parameter.detach().clone() for parameter in _trained(self._optimizers)]
        self._began_at = self.tracker.stopwatch.read() if goes_on and hold is not None else 0.0
        if hold is not None:
            hold.begin_iteration()
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._in_hand = True
        self._stepped.clear()
        self._count = batch.piece.samples
        if batch.units is not None:
            self.weigh(batch)

    def weigh(self, batch: HandedOut) -> None:
        self._count = batch.units
        self._weighed = True

    @property
    def unsettled(self) -> str | None:
        now = self.tracker.iteration
        if self.workers.count == 1 or now is None or now.paused is not None:
            return None
        return "each worker's weights are its own until the next average: call loader.settle() on all before saving"

    def settle(self) -> None:
        with self.tracker.activity.waiting():  # Afterwards the script continues without asking for a batch.
            self._end_iteration(meet=self.unsettled is not None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients if the batch is a copy of another worker's sample."""
        self.check_batch(optimizer)
        self.tracker.mark(Doing.STEPPED)
        if self.hand_outs.in_hand is not None:
            self.hand_outs.in_hand.closed = True
        now = self.tracker.iteration
        if now is not None and self._in_hand and not now.piece.samples:
            for model in self._models:
                for parameter in model.parameters():
                    parameter.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after a step, as a hook: average after the last batch, if the loop ended before it was computed."""
        self._stepped.add(id(optimizer))
        last = self._loop_over and self._in_hand and not self.hand_outs.ahead
        if last and self._stepped.issuperset(map(id, self._optimizers)):
            with self.tracker.activity.waiting():
                self._end_iteration(meet=False)

    def _meet(self, now: Iteration) -> None:
        """Average the models, and exchange the reports of all workers."""
        now.paused = time.perf_counter()
        averaged = self._optimizers if self._outer is None else ()
        named, counts = _averaged_tensors(self._models, averaged), _step_counts(averaged)
        kinds = [(name, tuple(each.shape), each.dtype) for name, each in {**named, "counts": counts}.items()]
        finite = self._nonfinite is None or all_finite(named.values())
        counted = self._units if finite else 0.0
        # A row has integers only: the float travels as its bits.
        extra = int(np.float64(counted).view(np.int64)), zlib.crc32(repr(kinds).encode())
        self._exchange.start(self._exchange.row(now, weighed=self._weighed, extra=extra))
        table = self._exchange.wait()
        assert table is not None
        units, digests = self._exchange.check(table).T
        odd = minority([str(each) for each in digests.tolist()])
        if odd:
            raise DisagreementError(
                f"{name_workers(odd)} had other weights or optimizer state to average than the others: every worker"
                " must step the same parameters before the first average"
            )
        total, group = float(np.ascontiguousarray(units).view(np.float64).sum()), self.workers.device_group
        if self._nonfinite is not None and not finite:
            self._nonfinite.skip(now, finite=bool(total))
        if total and group is not None:
            tensors = list(named.values())
            if self._narrow is not None:
                tensors = self._average_changes(tensors, counted / total, self._narrow)
            _average(tensors, counted / total, group)
            if len(counts) and self.workers.host_group is not None:
                _agree_on_step_counts(averaged, counts, counted=counted > 0, group=self.workers.host_group)
        if total and self._outer is not None:
            _step_outer(self._outer, self._optimizers, self._began)
        self.tracker.stopwatch.synchronised()
        now.synchronised_seconds = time.perf_counter() - now.paused
        self._units, self._weighed = 0.0, False

    @torch.no_grad()
    def _average_changes(self, tensors: Sequence[torch.Tensor], weight: float, narrow: NarrowSum) -> list[torch.Tensor]:
        """Replace the trained parameters by where the mean of the workers' changes leads; returns the other tensors."""
        trained, began = (
            [torch.view_as_real(each) if each.is_complex() else each for each in those]
            for those in (_trained(self._optimizers), self._began)
        )
        starts = iter(began)
        for number, chunk in enumerate(_chunks(trained)):
            pairs = list(zip(chunk, starts, strict=False))
            flat = torch.cat([(now - start).reshape(-1).float() for now, start in pairs])
            mean = narrow.sum(number, flat.mul_(weight) if weight else flat.zero_())
            parts = torch.split(mean, [each.numel() for each in chunk])
            for (parameter, start), part in zip(pairs, parts, strict=True):
                parameter.copy_(start + part.view_as(start))
        places = {each.data_ptr() for each in trained}
        return [each for each in tensors if each.data_ptr() not in places]


def _trained(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of the optimizers, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


@torch.no_grad()
def _step_outer(outer: Outer, optimizers: Sequence[torch.optim.Optimizer], began: Sequence[torch.Tensor]) -> None:
    """Step from where the period began, along the difference to the average, which the parameters hold now.

    DiLoCo, arXiv 2311.08105, Algorithm 1, with the momentum of `torch.optim.SGD`. The momentum is kept in the state of
    the first inner optimizer, so that it is saved and loaded with it; it is the same on all workers.
    """
    states: dict[Any, Any] = optimizers[0].state
    kept = states.setdefault(_OUTER, {})
    for number, (parameter, start) in enumerate(zip(_trained(optimizers), began, strict=True)):
        step = change = start - parameter
        if outer.momentum:
            momentum = kept.get(str(number), torch.zeros_like(change)).to(change.device)
            kept[str(number)] = momentum.mul_(outer.momentum).add_(change)
            step = change.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        parameter.copy_(start.sub(step, alpha=outer.rate))


def _averaged_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """The tensors to average: parameters, buffers and optimizer state, by name, in the same order on every worker.

    Integers are left out, and so are the optimizers' counts of steps (`_step_counts`).
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, model in enumerate(models):
        weights = ((name, weight.detach()) for name, weight in model.named_parameters() if weight.requires_grad)
        tensors.update({f"{index} {name}": tensor for name, tensor in (*weights, *model.named_buffers())})
    for number, state in enumerate(_states(optimizers)):
        keys = [key for key in sorted(state) if key != "step" and torch.is_tensor(state[key])]
        tensors.update({f"state {number} {key}": state[key] for key in keys})
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The state of each parameter of each optimizer."""
    return [optimizer.state.get(parameter, {}) for optimizer in optimizers for parameter in _trained([optimizer])]


def _step_counts(optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor:
    """The number of steps of each parameter, for optimizers that count them (such as Adam): float64, on the CPU."""
    counts = [torch.as_tensor(state["step"]) for state in _states(optimizers) if "step" in state]
    if not counts:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([count.to(counts[0].device) for count in counts]).to("cpu", torch.float64)


def _agree_on_step_counts(
    optimizers: Sequence[torch.optim.Optimizer], counts: torch.Tensor, *, counted: bool, group: dist.ProcessGroup
) -> None:
    """Set each parameter's count of steps to the largest one among the workers that are `counted`.

    A worker that had no samples, or skipped a step, is behind, but its averaged moments are as old as the others', and
    Adam corrects them by this count. The largest equals the count of a single process, and counts never decrease.

    Raises:
        RuntimeError: The collective failed.
    """
    agreed = counts.clone() if counted else torch.zeros_like(counts)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    states = [state for state in _states(optimizers) if "step" in state]
    for state, count in zip(states, agreed.tolist(), strict=True):
        if torch.is_tensor(state["step"]):
            state["step"].fill_(count)
        else:
            state["step"] = type(state["step"])(count)


def _average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup) -> None:
    """Replace each tensor, in place, by the sum over all workers of weight times tensor.

    The weights of all workers sum to 1. A worker of weight 0 does not count, even if it holds a NaN.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if flat.element_size() < _MIN_BYTES:
            flat = flat.float()  # A weight times a 16-bit number would lose bits in every average.
        flat = flat.mul_(weight) if weight else flat.zero_()
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(chunk, torch.split(flat, [each.numel() for each in chunk]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of neighbours of the same kind: small tensors share a message, without a copy of everything at once."""
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        unlike = chunk and (tensor.dtype, tensor.device) != (chunk[0].dtype, chunk[0].device)
        if unlike or (chunk and held + tensor.nbytes > _CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += tensor.nbytes
    if chunk:
        yield chunk

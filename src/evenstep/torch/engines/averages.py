"""The tensors of a local engine, which workers average between periods, and the step of an outer optimizer."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.fragments import weights_of
from evenstep.core.values import FloatArray, IntArray
from evenstep.core.workers import minority, name_workers
from evenstep.schemes import Scheme
from evenstep.tensors.messages import all_finite
from evenstep.tensors.outer import momentum_step
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.tracker import Tracker

_CHUNK_BYTES: Final = 32 * 2**20
_MIN_BYTES: Final = 4
_OUTER: Final = "outer_momentum"


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of the optimizers, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


@torch.no_grad()
def begin_anew(parameters: Iterable[torch.Tensor], began: dict[torch.Tensor, torch.Tensor]) -> None:
    """Set the parameters to where their period began, if that is known."""
    for parameter in parameters:
        parameter.copy_(began.pop(parameter, parameter))


@final
class Averaged:
    """What workers average: the models' trained parameters and buffers, and the optimizers' state.

    A parameter is trained from the first time on that it requires a gradient here, or where workers meet: scripts with
    several models freeze each while another steps. Under an outer optimizer each worker keeps its inner ones' state.
    """

    def __init__(
        self,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracker: Tracker,
    ) -> None:
        self._models, self._all, self._outer = models, optimizers, scheme.outer
        self._optimizers = optimizers if scheme.outer is None else ()
        self._guard = None if scheme.nonfinite == "spread" else NonfiniteGuard(scheme.nonfinite, tracker)
        self._trained: set[torch.Tensor] = set()
        buffers = {each.data_ptr() for model in models for each in model.buffers()}
        infinite = [
            name for name, each in self.tensors().items() if each.data_ptr() in buffers and not all_finite([each])
        ]
        self._infinite: Final = frozenset(infinite)
        """Buffers that are not finite from the start, such as a mask of -inf."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the same order on every worker.

        Integers of the models are left out, and so are the optimizers' counts of steps (`step_counts`).

        Raises:
            ConfigError: An optimizer keeps its state in integers, as those of 8 bits do.
        """
        tensors: dict[str, torch.Tensor] = {}
        for index, model in enumerate(self._models):
            self._trained.update(each for each in model.parameters() if each.requires_grad)
            weights = ((name, each.detach()) for name, each in model.named_parameters() if each in self._trained)
            tensors.update({f"{index} {name}": tensor for name, tensor in (*weights, *model.named_buffers())})
        for number, state in enumerate(_states(self._optimizers)):
            keys = [key for key in sorted(state) if key != "step" and torch.is_tensor(state[key])]
            for key in keys:
                if state[key].numel() > 1 and not (state[key].is_floating_point() or state[key].is_complex()):
                    raise ConfigError(
                        f"the optimizer keeps its state {key!r} in integers, which cannot be averaged: use one whose"
                        " state is in floating point, or a scheme like 'diloco', which leaves it to each worker"
                    )
            tensors.update({f"state {number} {key}": state[key] for key in keys})
        return {
            name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
            for name, tensor in tensors.items()
            if tensor.is_floating_point() or tensor.is_complex()
        }

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, in their order."""
        return parameters_of(self._all)

    def finite(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if none of these tensors has come to hold a NaN or an infinity, or if the scheme lets them spread."""
        return self._guard is None or all_finite(each for name, each in tensors.items() if name not in self._infinite)

    def met(self, now: Iteration, *, finite: bool, average: bool) -> None:
        """Count an average: this worker's tensors were `finite`, and so is the `average`, or else no worker's were.

        Raises:
            NonfiniteGradientError: The scheme refuses tensors that are not finite.
            DivergedError: See `NonfiniteGuard.skip`.
        """
        if self._guard is None:
            return
        if finite:
            self._guard.passed()
            return
        self._guard.skip(now, finite=average)
        clean_state(self._all)  # Or else the next step spoils the weights again.

    def step_counts(self) -> torch.Tensor:
        """The number of steps of each parameter, for optimizers that count them (such as Adam): float64, on the CPU."""
        counts = [torch.as_tensor(state["step"]) for state in _states(self._optimizers) if "step" in state]
        if not counts:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack([count.to(counts[0].device) for count in counts]).to("cpu", torch.float64)

    def set_step_counts(
        self, counts: torch.Tensor, weight: float, largest_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Set each parameter's count of steps to the largest one among the workers that count, those with a weight.

        A worker that had no samples, or skipped a step, is behind, but its averaged moments are as old as the others',
        and Adam corrects them by this count. The largest equals the count of a single process, and counts never
        decrease.

        Args:
            counts: This worker's, as from `step_counts`.
            weight: Its weight in the average.
            largest_of: Returns the largest one of all workers for each value of a tensor.
        """
        if not len(counts):
            return
        largest = largest_of(counts if weight else torch.zeros_like(counts))
        states = [state for state in _states(self._optimizers) if "step" in state]
        for state, count in zip(states, largest.tolist(), strict=True):
            if torch.is_tensor(state["step"]):
                state["step"].fill_(count)
            else:
                state["step"] = type(state["step"])(count)

    def complete(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Add what any worker's optimizers keep for a parameter not stepped here: zeros, and single numbers.

        A worker may have had no samples, a batch that does not use the parameter, or an overflow. `gather` returns what
        each worker has given to it.
        """
        described = {
            str(number): {
                key: [
                    list(each.shape),
                    str(each.dtype).removeprefix("torch."),
                    each.is_cpu,
                    0 if each.dim() else each.item(),
                ]
                for key, each in state.items()
                if torch.is_tensor(each)
            }
            for number, state in enumerate(_states(self._optimizers))
        }
        owners = [(each.state, parameter) for each in self._optimizers for parameter in parameters_of([each])]
        for states in gather(described):
            for number, (state, parameter) in enumerate(owners):
                for key, (shape, dtype, on_cpu, value) in states.get(str(number), {}).items():
                    if state[parameter].get(key) is None:
                        device = "cpu" if on_cpu else parameter.device
                        state[parameter][key] = torch.full(shape, value, dtype=getattr(torch, dtype), device=device)

    @torch.no_grad()
    def step_outer(self, stepped: Mapping[int, torch.Tensor], began: dict[torch.Tensor, torch.Tensor]) -> None:
        """Step from where the period began, along the difference to the average, which the parameters hold now.

        DiLoCo, arXiv 2311.08105, Algorithm 1, with the momentum of `torch.optim.SGD`. The momentum is kept in the state
        of the first inner optimizer, so that it is saved and loaded with it; it is the same on all workers. Without an
        outer optimizer the average stays.
        """
        if (outer := self._outer) is None:
            return
        states: dict[Any, Any] = self._all[0].state
        kept = states.setdefault(_OUTER, {})
        for number, parameter in stepped.items():
            start = began.pop(parameter, parameter)
            step = change = start - parameter
            if outer.momentum:
                momentum = kept.get(str(number), torch.zeros_like(change)).to(change.device)
                kept[str(number)] = momentum
                step = momentum_step(change, momentum, outer.momentum, nesterov=outer.nesterov)
            parameter.copy_(start.sub(step, alpha=outer.rate))


def clean_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let the optimizers go on without the NaNs and infinities in their state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in filter(torch.is_tensor, state.values()):
                value.nan_to_num_(0.0, 0.0, 0.0)


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The state of each parameter of each optimizer."""
    return [optimizer.state.get(parameter, {}) for optimizer in optimizers for parameter in parameters_of([optimizer])]


def kinds_of(*parts: Mapping[str, torch.Tensor]) -> int:
    """A fingerprint of the names, shapes and types of these tensors."""
    kinds = [(name, tuple(each.shape), each.dtype) for part in parts for name, each in part.items()]
    return zlib.crc32(repr(kinds).encode())


def told(kinds: int, units: Sequence[float]) -> list[int]:
    """What a worker tells of its part in an average: what it has to average, and its units in each fragment.

    Units are those since the last average; NaN if the worker does not count. Rows hold integers: floats travel as bits.
    """
    return [kinds, *np.array(units).view(np.int64).tolist()]


def weights_in(table: IntArray) -> tuple[IntArray, list[FloatArray]]:
    """The kinds that each worker has told, by rank, and the weights of all workers in each fragment."""
    kinds, *units = table.T
    return kinds, [weights_of(np.ascontiguousarray(each).view(np.float64)) for each in units]


def require_same_kinds(fingerprints: IntArray) -> None:
    """Check that all workers, by rank, have the same tensors to average.

    Raises:
        DisagreementError: They have not.
    """
    if odd := minority([str(each) for each in fingerprints.tolist()]):
        raise DisagreementError(
            f"{name_workers(odd)} had other weights or optimizer state to average than the others: every worker must"
            " step the same parameters before the first average"
        )


def average(tensors: Sequence[torch.Tensor], weight: float, add_up: Callable[[torch.Tensor], object]) -> None:
    """Replace each tensor, in place, by the sum over all workers of weight times tensor.

    The weights of all workers sum to 1. A worker of weight 0 does not count, even if it holds a NaN. `add_up` replaces
    a tensor by its sum over all workers.

    Raises:
        RuntimeError: A collective failed.
    """
    for chunk in chunks(tensors):
        flat = flat_of(chunk, weight)
        add_up(flat)
        split(flat, chunk)


def flat_of(tensors: Sequence[torch.Tensor], weight: float) -> torch.Tensor:
    """Weight times these tensors, as one vector; zeros for a weight of 0, even if they hold a NaN."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if flat.element_size() < _MIN_BYTES:
        flat = flat.float()  # A weight times a 16-bit number would lose bits in every average.
    return flat.mul_(weight) if weight else flat.zero_()


def split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a vector into these tensors."""
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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

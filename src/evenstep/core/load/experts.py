"""Batch sizes with which all workers finish together, from the speed predictions that were best so far: LB-BSP."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Final, TypeAlias, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.change_cost import ChangeCost
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.expert import Averages, Even, Expert, Forecasts, require_speeds
from evenstep.core.load.shares import in_multiples, share_out
from evenstep.core.nearest import nearest
from evenstep.core.values import Allocation, FloatArray, IntArray, Problem, Reports

Makers: TypeAlias = tuple[Callable[[int], Expert], ...]
"""Functions that each make an expert for a number of workers."""

PREDICTORS: Final[Mapping[str, Makers]] = MappingProxyType(
    {
        "experts": (Averages, Even),
        "experts+narx": (Averages, Even, Forecasts),
        "ema": (partial(Averages, weights=(0.2,)),),
        "last": (partial(Averages, weights=(1.0,)),),
        "narx": (Forecasts,),
    }
)
"""Several experts, or one alone, by the names that schemes use."""

_UNIT: Final = 2.0**40
"""The unit of speeds as integers, whose sums are exact."""
_SQUARINGS: Final = 4

# As array methods they would be three calls each, and an iteration has a budget of calls.
_largest, _least, _total = np.maximum.reduce, np.minimum.reduce, np.add.reduce
_all, _any = np.logical_and.reduce, np.logical_or.reduce


@final
@dataclass(slots=True)
class ExpertsPolicy(LoadPolicy):
    """Prediction with expert advice (Cesa-Bianchi and Lugosi, 2006), and ski rental for changes of sizes.

    LB-BSP (arXiv 1806.02508; SoCC'20) gives worker i of N the batch x_i = X v_i / (v_1 + ... + v_N) for predicted
    speeds v. Which prediction is best depends on how speeds change, so several *experts* predict. After an iteration
    the paces p (time per sample) of all workers are known, and expert j is charged the time that its shares q_j = x / X
    would have taken, relative to the least possible:

        loss_j <- discount * loss_j + max_i(p_i q_ij) / (1 / sum_i(1 / p_i)) - 1

    The proposal is the mean of the experts' shares, weighted by exp(-steepness * loss_j). The time of an iteration is
    convex in the shares, so the mean is never worse than the weighted losses. The discount lets the weights follow
    changes of the best expert (Herbster and Warmuth, 1998).

    An account, which never falls below 0, adds up what the last proposal would have saved over the sizes in use, in an
    iteration that it had not seen. When the account reaches the cost of a change, sizes change and the account is
    emptied. The cost is `change_cost`, or is measured. Until it is known, a change counts as `ChangeCost.noise`
    iterations, which the first iteration alone may pay. An iteration that a change has made much longer is ignored.
    Sizes that were used before cost nothing, so the best of them may be taken again at any time: with a compiler for
    each size, slowness that returns is paid for once.

    Deviations from LB-BSP: it uses one predictor, applies every new solution, and has a manager process. For devices
    whose time has a fixed part its GPU version solves for sizes with a profiled model. Here sizes reach the same result
    in a few iterations, because each pace is measured at the latest size.

    Sizes are equal until every worker has a pace. A worker without samples keeps its last one.

    All copies decide alike: they use only + - * / and comparisons, sums are of integers or over the few experts in
    their order, and exp(-y) is (1 + y/16)^-16 by repeated multiplication.
    """

    workers: int
    load: "Experts"
    # The limits, relative sizes and sizes of the last allocation; not part of the state, and so without `init=False`.
    _latest: tuple[Problem, IntArray, IntArray] | None = None
    _experts: list[Expert] = field(init=False)
    _cost: ChangeCost = field(init=False)
    _seen: IntArray = field(init=False)  # Measured iterations of each worker.
    paces: FloatArray = field(init=False)  # The latest microseconds per sample of each worker; 0: unknown.
    _shares: FloatArray | None = field(init=False, default=None)  # Each expert's proposal, [experts, workers].
    _losses: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))
    proposal: IntArray | None = field(init=False, default=None)  # Relative sizes.
    _used: IntArray | None = field(init=False, default=None)  # The same for the sizes in use; None: equal.
    _proposed: IntArray | None = field(init=False, default=None)  # The sizes that the proposal would have given.
    _account: float = field(init=False, default=0.0)
    _kept: int = field(init=False, default=0)  # Iterations since sizes changed.

    def __post_init__(self) -> None:
        self._experts = [make(self.workers) for make in self.load.makers]
        self._cost = ChangeCost(compiles=self.load.compiles)
        self._seen = np.zeros(self.workers, dtype=np.int64)
        self.paces = np.zeros(self.workers)

    def observe(self, reports: Reports) -> None:
        samples, microseconds, cost = reports.samples, reports.compute_microseconds, self._cost
        measured = (samples > 0) & (microseconds > 0)
        if not _any(measured):
            return
        first_use = cost.observe(samples, microseconds)
        self._seen = self._seen + measured
        self._kept += 1
        measured &= self._seen > self.load.warmup
        # Sizes that have just changed need a second iteration, to show what the first one cost. A device's reports come
        # an iteration late, so the first may still be about the previous sizes.
        changed = self._kept == 1 or (self._kept == 2 and first_use)
        tried = changed and self.load.change_cost is None and self._used is not None and not cost.known
        if not _any(measured) or (first_use and (tried or cost.iterations > cost.noise)):
            return
        paces = microseconds / np.maximum(samples, 1)
        here = None if _all(measured) else np.flatnonzero(measured)
        self.paces = paces if here is None else np.where(measured, paces, self.paces)
        first = self._shares is None
        self._charge(paces, here)
        if self._proposed is not None:
            self._account = max(self._account + _saved(paces, samples, self._proposed, here), 0.0)
        for expert in self._experts:
            expert.observe(reports, paces, measured)
        if _all(self.paces):
            proposal = self._propose()
            if first:  # Charge experts that ignore the only iteration so far for it at once.
                self._charge(paces, here)
                proposal = self._propose()
                # Sizes are equal, though those of a first period may have changed while it lasted.
                self._account = max(_saved(paces, np.ones_like(samples), proposal, here), 0.0)
            if tried:
                return
            if self._account >= (cost.price if self.load.change_cost is None else self.load.change_cost):
                self._used, self._account, self._kept = proposal, 0.0, 0
            elif (free := cost.free(proposal)) is not None:
                self._used, self._kept = free, 0

    def _charge(self, paces: FloatArray, here: IntArray | None) -> None:
        """Charge each expert the time that its last proposal would have taken, `here` or on all workers."""
        if self._shares is None:
            return
        shares = self._shares
        if here is not None:
            paces, shares = paces[here], shares[:, here]
        fastest = float(_least(paces))
        best = fastest * _UNIT / int(_total((fastest * _UNIT / paces).astype(np.int64)))
        took = _largest(paces * shares, axis=1)
        if here is not None:
            took = took / [math.fsum(row) for row in shares.tolist()]
        self._losses = self.load.discount * self._losses + (took / best - 1.0)

    def _propose(self) -> IntArray:
        """Ask the experts, and weight their answers by their losses."""
        guesses: list[FloatArray] = []
        for expert in self._experts:
            found = expert.speeds()
            if self.load.experts:
                require_speeds(expert, found, self.workers)
            guesses += [found] if found.ndim == 1 else [*found]
        speeds = np.array(guesses)
        shared = (speeds * (_UNIT / _largest(speeds, axis=1, keepdims=True))).astype(np.int64)
        self._shares = shared / _total(shared, axis=1, keepdims=True)
        if len(self._losses) != len(speeds):
            self._losses = np.zeros(len(speeds))
        growth = 1.0 + (self._losses - _least(self._losses)) * (self.load.steepness / 2**_SQUARINGS)
        for _ in range(_SQUARINGS):
            growth = growth * growth
        mean = _total(self._shares / growth[:, None], axis=0)
        self.proposal = np.maximum((mean * (_UNIT / _largest(mean))).astype(np.int64), 1)
        return self.proposal

    def allocate(self, problem: Problem) -> Allocation:
        if self.proposal is None or len(problem.minimum) != self.workers:
            return Allocation(sizes=equal_sizes(problem), basis="start")
        limits = in_multiples(problem)
        self._proposed = proposed = share_out(limits, self.proposal, in_least_time=True)
        proposed.flags.writeable = False  # It is both returned and kept.
        if self._used is None:
            return Allocation(sizes=equal_sizes(problem), basis="start")
        if self._used is self.proposal:
            self._latest = limits, self._used, proposed
        elif self._latest is None or self._latest[0] is not limits or self._latest[1] is not self._used:
            self._latest = limits, self._used, share_out(limits, self._used, in_least_time=True)
        return Allocation(sizes=self._latest[2], weights=self._used)

    def recall(self, known: Sequence[tuple[LoadPolicy, int] | None]) -> None:
        """New workers count as the median of those that stay until they have reported."""
        sources = [(each[0], each[1]) if each and isinstance(each[0], ExpertsPolicy) else None for each in known]
        former = next((source[0] for source in sources if source is not None), None)
        if former is None or not former.paces.all():
            return
        for worker, source in enumerate(sources):
            if source is not None:
                policy, index = source
                self.paces[worker], self._seen[worker] = policy.paces[index], policy._seen[index]
        self.paces[self.paces <= 0] = median(self.paces[self.paces > 0].tolist())  # np.median loads numpy.ma: 0.08 s.
        self._losses = former._losses
        self._cost.load_state_dict(former._cost.state_dict())
        recalled = [
            expert.recall([None if each is None else (each[0]._experts[at], each[1]) for each in sources])
            for at, expert in enumerate(self._experts)
        ]
        if all(recalled):
            self._used = self._propose()


def _saved(paces: FloatArray, samples: IntArray, others: IntArray, here: IntArray | None) -> float:
    """The fraction of an iteration with these samples that the other sizes would have saved."""
    if here is not None:
        paces, samples, others = paces[here], samples[here], others[here]
    took = float(_largest(paces * samples)) / int(_total(samples))
    return 1.0 - float(_largest(paces * others)) / max(int(_total(others)), 1) / took


@final
@dataclass(frozen=True, kw_only=True)
class Experts(Load):
    """LB-BSP: sizes in proportion to predicted speeds.

    Attributes:
        predictor: A name of `PREDICTORS`.
        experts: Replace those of the predictor; each makes an expert for a number of workers.
        change_cost: The cost of a change of sizes, in iterations, >= 0; None to measure it.
        compiles: Whether the device compiles for each new size, as XLA does.
        warmup: The number of first iterations of a worker that are not counted: allocators and caches settle in one.
        discount: The weight of an iteration's losses in the next one, above 0 and below 1: 0.97 remembers about 33
            iterations. Values from 0.9 to 0.99 differ little.
        steepness: An expert whose loss is larger by 1 / steepness weighs e times less, > 0. Values from 10 to 30 differ
            little.
    """

    predictor: str = "experts"
    experts: Makers = ()
    change_cost: float | None = None
    compiles: bool = False
    warmup: int = 1
    discount: float = 0.97
    steepness: float = 10.0

    def __post_init__(self) -> None:
        Load.__post_init__(self)
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"there is no predictor {self.predictor!r}; {nearest(self.predictor, PREDICTORS)}")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} iterations is not possible: use 0 or more")
        if self.change_cost is not None and not 0.0 <= self.change_cost < math.inf:
            raise ConfigError(f"a change of sizes cannot cost {self.change_cost} iterations: use a number >= 0")
        if not 0.0 < self.discount < 1.0 or not 0.0 < self.steepness < math.inf:
            raise ConfigError(
                f"discount={self.discount}, steepness={self.steepness}: use 0 < discount < 1 and steepness > 0"
            )

    @property
    def makers(self) -> Makers:
        """The functions that make the experts."""
        return self.experts or PREDICTORS[self.predictor]

    @property
    def uses_forecasts(self) -> bool:
        return any(make(1).uses_forecasts for make in self.makers)

    def policy(self, workers: int) -> ExpertsPolicy:
        return ExpertsPolicy(workers, self)

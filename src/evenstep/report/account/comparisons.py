"""How much faster a run's own sizes are than equal ones, from its own iterations with equal sizes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

_FloatArray: TypeAlias = npt.NDArray[np.float64]
_Sizes: TypeAlias = tuple[float, ...]
_Times: TypeAlias = tuple[float, float]
"""The seconds of an iteration, and its seconds if no worker had waited for its input."""

_REFERENCES: Final = 16
_NEIGHBOURS: Final = 24
_BEFORE: Final = 8
_SOON: Final = 20
_GROUPS: Final = 8
_BLOCKS: Final = 64
_ENOUGH: Final = 4
_COVERED: Final = 0.8
_RESAMPLES: Final = 400
_CONFIDENCE: Final = (2.5, 97.5)
_SHORTEST: Final = 1e-9
_IN_A_ROW: Final = 3
_WATCHED: Final = 100
_FOUND: Final = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the ends of its 95 % confidence interval."""

    low: float
    estimate: float
    high: float

    @property
    def ends(self) -> str:
        """The ends, as `1.20 to 1.35`; empty where they are the same to two digits."""
        low, high = f"{self.low:.2f}", f"{self.high:.2f}"
        return "" if low == high else f"{low} to {high}"

    def __str__(self) -> str:
        return f"{self.estimate:.2f}" + (f" ({self.ends})" if self.ends else "")


@final
class Comparisons:
    """Takes the iterations of a run in their order, and says how many times as fast its sizes were as equal ones.

    A *block* is a few iterations in a row with equal sizes, and what followed until the next block. Its iterations
    with decided sizes are grouped by sizes that differ by at most a factor of 2 for any worker; a group counts if it
    was seen right before the block or within 20 iterations after it. The ratio of a group is the median seconds of the
    block's equal iterations over the median seconds of the group's iterations next to the block. So a drift of the
    machine's speed cancels out, and a single slow iteration counts little. Iterations in no group wait for the next
    block; if they are in none of its groups either, they count as if equal sizes had taken as long.

    A change of sizes makes data workers fetch samples out of turn, which equal sizes alone would not. So each ratio is
    taken with and without the waiting for input, and the smaller one counts.

    The interval is a percentile bootstrap: iterations are resampled within their blocks and groups, and several blocks
    among each other. On a machine that is disturbed for seconds, all iterations of a block are off together. The size
    of that error is seen where nothing changed: any three iterations in a row with decided sizes are compared with
    those around them as a block is, and each resampled block gets the error of one of these comparisons.

    Memory does not grow with the run: of more than 64 blocks, neighbours are merged.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._recent: deque[tuple[_Sizes, _Times]] = deque(maxlen=_BEFORE)
        self._within = False
        self._decided = 0
        self._left = _Block()  # The groups that belong to no block yet.
        self._errors = _Errors()

    @property
    def references(self) -> int:
        """The number of iterations with equal sizes."""
        return sum(block.references for block in self._blocks)

    def add_equal(self, times: Sequence[_Times], paces: _FloatArray) -> None:
        """Add iterations with equal sizes; `paces` are their mean seconds per sample, shape [workers]."""
        if not self._within:
            self._open()
        block = self._blocks[-1]
        block.equal = [*block.equal, *times][-_REFERENCES:]
        block.paces = (block.paces * block.references + paces * len(times)) / (block.references + len(times))
        block.references += len(times)

    def add_decided(self, sizes: _Sizes, times: Sequence[_Times]) -> None:
        """Add iterations with these sizes, which are not equal."""
        self._within = False
        self._decided += len(times)
        self._recent.extend((sizes, each) for each in times[-_BEFORE:])
        group: _Group | None = None
        if self._blocks:
            block = self._blocks[-1]
            group = block.group_of(sizes, soon=block.followed < _SOON)
            if block.followed < _WATCHED:
                self._errors.add(sizes, [seconds for seconds, _ in times[:_WATCHED]])
            block.followed += len(times)
        group = group or self._left.group_of(sizes, soon=True)
        if group is not None:
            group.add(times)

    def add_short(self, sizes: _Sizes, seconds: Sequence[float]) -> None:
        """Add iterations on the short last slice of an epoch, which gain as much as whole ones, but measure nothing."""
        self._decided += len(seconds)
        latest = self._blocks[-1] if self._blocks else self._left
        group = latest.group_of(sizes, soon=False) or self._left.group_of(sizes, soon=False)
        if group is not None:
            group.iterations += len(seconds)
            group.seconds += sum(seconds)

    def paces(self) -> Iterator[tuple[int, _FloatArray]]:
        """For each block its number of iterations, and every worker's seconds per sample at equal sizes."""
        for block in self._blocks:
            yield block.references + block.followed, block.paces

    def speed_up(self, seconds: float) -> Interval | None:
        """How many times as long as the whole run, of that many seconds, equal sizes would have taken.

        None if too few iterations had equal sizes, or if too few others can be compared with them.
        """
        covered = sum(group.iterations for block in self._blocks for group in block.groups)
        if self.references < _ENOUGH or covered < max(_ENOUGH, _COVERED * self._decided):
            return None
        saved = sum(block.saved() for block in self._blocks)
        generator = np.random.default_rng(0)
        resampled = np.array([block.resampled(generator, self._errors.drawn(generator)) for block in self._blocks])
        if len(self._blocks) > 2:
            drawn = generator.multinomial(len(self._blocks), [1 / len(self._blocks)] * len(self._blocks), _RESAMPLES)
            resampled = resampled * drawn.T
        low, high = np.percentile(resampled.sum(axis=0), _CONFIDENCE)
        return Interval(
            low=1 + min(float(low), saved) / seconds,
            estimate=1 + saved / seconds,
            high=1 + max(float(high), saved) / seconds,
        )

    def _open(self) -> None:
        """Start a block, with what came right before it."""
        self._within = True
        block = _Block()
        for sizes, times in self._recent:
            group = block.group_of(sizes, soon=True)
            if group is not None:
                group.near.append(times)
        for left in self._left.groups:
            group = block.group_of(left.sizes, soon=False)
            if group is not None:
                group.iterations += left.iterations
                group.seconds += left.seconds
        self._left = _Block()
        if len(self._blocks) == _BLOCKS:
            self._blocks = [one.merged(other) for one, other in pairwise(self._blocks)][::2]
        self._blocks.append(block)


@final
@dataclass(slots=True)
class _Group:
    """Iterations of similar sizes after a block; `near` are the times of those next to it."""

    sizes: _Sizes
    near: list[_Times] = field(default_factory=list)
    iterations: int = 0
    seconds: float = 0.0

    def add(self, times: Sequence[_Times]) -> None:
        self.iterations += len(times)
        self.seconds += sum(seconds for seconds, _ in times)
        self.near.extend(times[: _NEIGHBOURS - len(self.near)])

    def like(self, sizes: _Sizes) -> bool:
        return all(2 * one >= other and 2 * other >= one for one, other in zip(self.sizes, sizes, strict=True))

    def saved(self, equal: _FloatArray, near: _FloatArray) -> _FloatArray:
        """How many seconds longer equal sizes would have taken, by the medians of times, shape [..., 2]."""
        ratio = (equal / np.maximum(near, _SHORTEST)).min(axis=-1)
        return np.asarray((ratio - 1) * np.minimum(near[..., 0] * self.iterations, self.seconds))


@final
@dataclass(slots=True)
class _Block:
    """Iterations with equal sizes, and the groups of those that followed."""

    equal: list[_Times] = field(default_factory=list)
    references: int = 0
    paces: _FloatArray = field(default_factory=lambda: np.zeros(1))
    followed: int = 0
    groups: list[_Group] = field(default_factory=list)

    def group_of(self, sizes: _Sizes, *, soon: bool) -> _Group | None:
        group = next((each for each in self.groups if each.like(sizes)), None)
        if group is None and soon and len(self.groups) < _GROUPS:
            group = _Group(sizes)
            self.groups.append(group)
        return group

    def saved(self) -> float:
        equal = np.median(self.equal, axis=0)
        return sum(float(each.saved(equal, np.median(each.near, axis=0))) for each in self.groups if each.iterations)

    def resampled(self, generator: np.random.Generator, errors: _FloatArray) -> _FloatArray:
        """The seconds saved in each resampling, with factors by which the block's iterations may be off."""
        equal = _medians(self.equal, generator) * errors[:, np.newaxis]
        result = np.zeros(_RESAMPLES)
        for group in self.groups:
            if group.iterations:
                result += group.saved(equal, _medians(group.near, generator))
        return result

    def merged(self, other: "_Block") -> "_Block":
        """Both blocks as one, with the memory of one."""
        both = _Block(
            equal=[*self.equal, *other.equal][-_REFERENCES:],
            references=self.references + other.references,
            paces=(self.paces * self.followed + other.paces * other.followed) / max(self.followed + other.followed, 1),
            followed=self.followed + other.followed,
            groups=self.groups,
        )
        for group in other.groups:
            known = both.group_of(group.sizes, soon=True)
            if known is not None:
                known.iterations += group.iterations
                known.seconds += group.seconds
                known.near = [*known.near, *group.near][-_NEIGHBOURS:]
        return both


@final
class _Errors:
    """By what factors a few iterations in a row differ from those around them though nothing changed."""

    def __init__(self) -> None:
        self._found: deque[float] = deque(maxlen=_FOUND)
        self._sizes: _Sizes = ()
        self._window: list[float] = []

    def add(self, sizes: _Sizes, seconds: Sequence[float]) -> None:
        """Add iterations in a row with these sizes."""
        if sizes != self._sizes:
            self._sizes, self._window = sizes, []
        for each in seconds:
            self._window.append(each)
            if len(self._window) == 2 * _BEFORE + _IN_A_ROW:
                within = self._window[_BEFORE:-_BEFORE]
                around = self._window[:_BEFORE] + self._window[-_BEFORE:]
                self._found.append(median(within) / max(median(around), _SHORTEST))
                del self._window[:_IN_A_ROW]

    def drawn(self, generator: np.random.Generator) -> _FloatArray:
        """One factor for each resampling; 1 as long as none is known."""
        return generator.choice(list(self._found), _RESAMPLES) if self._found else np.ones(_RESAMPLES)


def _medians(times: Sequence[_Times], generator: np.random.Generator) -> _FloatArray:
    """The medians of resampled times, shape [resamples, 2]."""
    drawn = generator.integers(len(times), size=(_RESAMPLES, len(times)))
    return np.asarray(np.median(np.array(times)[drawn], axis=1))

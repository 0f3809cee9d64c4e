"""Data of each worker's own, of unknown length: every worker takes its next samples, as many as its size says."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np

from evenstep.core.disagreement import TOGETHER, Field, require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.samples.share import Request, Share
from evenstep.core.values import UNLIMITED, IntArray
from evenstep.core.workers import name_workers


@final
class OwnShares:
    """One worker's shares of an epoch in which each worker draws from a loader of its own.

    Workers tell each other a word: 2 k + e, where k is how many samples of the epoch a worker knows of, those taken
    included, and e is 1 if there are no more. Words come with other messages (`hear`). Workers meet for them only where
    a worker is to take all samples that it has told of, and may have more; all have the same words, so all meet or
    none. So it is known of each share whether it is the last. A size is cut to what a worker has left. A worker without
    samples repeats its last one, whose gradient does not count.

    Args:
        worker: The rank of the worker whose shares these are.
        sizes: Returns the sizes as currently decided, int64 of shape [workers].
        meet: Reads this worker's loader until it knows of so many samples, and returns the words of all workers, int64
            of shape [workers]. All workers call it together.
        minimum: The fewest samples that a worker can compute on.
        stops: Whether the epoch is over when one worker has no samples left, and not when none has.
        taken: The samples that each worker has taken already, int64 of shape [workers].
        iteration: The iterations in which they were taken.

    Attributes:
        misses: Always 0: nothing is fetched out of turn.
        iteration: The iterations that were handed out.

    >>> shares = OwnShares(
    ...     worker=0,
    ...     sizes=lambda: np.array([4, 2]),
    ...     meet=lambda _: np.array([2 * 5 + 1, 2 * 1 + 1]),
    ...     taken=np.zeros(2, dtype=np.int64),
    ... )
    >>> while (share := shares.share()) is not None:
    ...     print(share.sizes.tolist(), share.positions)
    ...     shares.advance()
    [4, 1] (0, 1, 2, 3)
    [1, 0] (4,)
    """

    misses = 0

    def __init__(
        self,
        *,
        worker: int,
        sizes: Callable[[], IntArray],
        meet: Callable[[int], IntArray],
        taken: IntArray,
        minimum: int = 1,
        stops: bool = False,
        iteration: int = 0,
    ) -> None:
        self._worker = worker
        self._decided = sizes
        self._meet = meet
        self._minimum = minimum
        self._stops = stops
        self._taken = taken
        self._known, self._ended = taken, np.zeros(len(taken), dtype=bool)
        self._sizes: IntArray | None = None
        self._wanted = 1
        # The latest iterations after which a state can be taken; scripts fetch far fewer ahead.
        self._history = deque([taken], maxlen=1024)
        self.iteration = iteration
        self.over = False
        """Whether the epoch is over."""

    @property
    def iterations(self) -> int:
        """The iterations of the epoch once it is over, and UNLIMITED before."""
        return self.iteration if self.over else UNLIMITED

    def after(self, iteration: int) -> IntArray:
        """The samples that each worker had taken after so many iterations of the epoch, int64 of shape [workers]."""
        return self._history[max(iteration - self.iteration - 1, -len(self._history))]

    def hear(self, words: IntArray) -> None:
        """Note the words of all workers, int64 of shape [workers]."""
        self._known, self._ended = words >> 1, (words & 1).astype(bool)

    def share(self) -> Share | None:
        """The share to compute on now; None when the epoch is over. May wait for other workers.

        Raises:
            ConfigError: A worker's loader has no sample at all.
        """
        decided = self._decided()
        wanted = np.maximum(decided, 1)
        self._wanted = int(wanted[self._worker])
        if ((self._known - self._taken <= wanted) & ~self._ended).any():
            self.hear(self._meet(int(self._taken[self._worker]) + self._wanted + 1))
        empty = np.flatnonzero(self._ended & (self._known == 0)).tolist()
        if empty:
            raise ConfigError(
                f"the loader of worker {empty[0]} gave no sample in this epoch: give it a part of the data that can be"
                " read again in every epoch (a whole batch with drop_last, and a shard for each worker of a stream)"
            )
        left = self._known - self._taken
        # Where the only workers left are those without a size, they take what computes at all.
        sizes = np.minimum(decided, left)
        self._sizes = sizes if sizes.any() else np.minimum(wanted, left)
        self.over = bool((left == 0).any() if self._stops else not left.any())
        if self.over:
            return None
        start, size = int(self._taken[self._worker]), int(self._sizes[self._worker])
        positions = tuple(range(start, start + size)) or (max(start - 1, 0),)
        dry = self._ended & (left == self._sizes)
        return Share(
            iteration=self.iteration,
            positions=positions * max(-(-self._minimum // len(positions)), 1),
            samples=size,
            sizes=self._sizes,
            ends_epoch=bool(dry.any() if self._stops else dry.all()),
        )

    @property
    def ahead(self) -> int:
        """The samples of the epoch to know of at the report on this share, so that the next one needs no meeting."""
        assert self._sizes is not None
        # An eighth more, as sizes change by little from one iteration to the next.
        grown = self._wanted + max(self._wanted // 8, 1)
        return int(self._taken[self._worker] + self._sizes[self._worker]) + grown + 1

    def advance(self) -> None:
        """The share has been handed out."""
        assert self._sizes is not None
        self.iteration += 1
        self._taken = self._taken + self._sizes
        self._history.append(self._taken)

    def replan(self) -> None:
        """See `Shares.replan`; every share is planned when it is asked for."""

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """See `Shares.request`; the worker's own loader fetches ahead."""
        return None


_PLACE: Final[Mapping[str, Field]] = MappingProxyType(
    {
        "epoch": Field(phrase="epoch {}", verb="is in", then=TOGETHER),
        "iteration": Field(phrase="iteration {} of the epoch", verb="is at", then=TOGETHER),
    }
)


def words_of(records: Sequence[Mapping[str, Any]]) -> IntArray:
    """The words of workers that met, int64 of shape [workers].

    Args:
        records: By rank, the `epoch`, the `iteration` and the `word`, as `first` a checksum of the worker's first
            samples in the epoch, or 0 if it is unknown, and whether its script `vouches` for them.

    Raises:
        DisagreementError: They are not at the same place.
        ConfigError: Two of them read the same, and no script vouches for it.
    """
    require_agreement(records, _PLACE)
    firsts = [record["first"] for record in records]
    alike = [rank for rank, first in enumerate(firsts) if first and firsts.count(first) > 1]
    if alike and not any(record["vouches"] for record in records):
        same = [rank for rank in alike if firsts[rank] == firsts[alike[0]]]
        raise ConfigError(
            f"the loaders of {name_workers(same)} began with the same samples, so these would count more than once:"
            " give each worker its own part, by its rank (split_by_node of webdataset,"
            ' datasets.distributed.split_dataset_by_node), or, if parts that differ begin alike, partition="private"'
        )
    return np.array([record["word"] for record in records], dtype=np.int64)

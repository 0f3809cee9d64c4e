"""How many iterations each worker has done, and so who is slowest, who fastest, and by how much each leads.

Knows nothing of time, commits or bounds.
"""

from collections import OrderedDict, defaultdict
from typing import final


@final
class Progress:
    """Iterations of the workers that have joined. No method looks at all of them.

    Each takes constant time, except that `leave` walks from an end of the range of iterations to where it ends without
    the worker; that range grows by one with a push at most, so the walks are paid for by the pushes before them.

    Attributes:
        slowest, fastest: Iterations of the slowest and of the fastest worker, 0 where none has joined; to be read only.
    """

    __slots__ = ("_iterations", "_workers_at", "fastest", "slowest")

    def __init__(self) -> None:
        self._iterations: dict[int, int] = {}
        # An OrderedDict finds its last key at once however many were taken out of it; a dict steps over their places.
        self._workers_at: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self.slowest = 0
        self.fastest = 0

    def __contains__(self, worker: int) -> bool:
        return worker in self._iterations

    def __len__(self) -> int:
        return len(self._iterations)

    def iterations(self, worker: int) -> int:
        """Iterations of this worker, which has joined."""
        return self._iterations[worker]

    def lead(self, worker: int) -> int:
        """Its iterations minus the slowest's; of a worker that has joined."""
        return self._iterations[worker] - self.slowest

    def last_of_slowest(self) -> int:
        """Of the slowest workers, of which there must be one, the one that came to this iteration last."""
        return next(reversed(self._workers_at[self.slowest]))

    def join(self, worker: int) -> None:
        """A worker that had not joined begins level with the slowest; at 0 where there is none."""
        self._put(worker, self.slowest)

    def advance(self, worker: int) -> None:
        """A worker that has joined has done one more iteration."""
        done = self._iterations[worker]
        level = self._workers_at[done]
        del level[worker]
        self._put(worker, done + 1)
        if done == self.fastest:
            self.fastest += 1
        if not level:
            del self._workers_at[done]
            if done == self.slowest:
                self.slowest += 1  # it alone was the slowest, so that nobody is behind where it is now

    def leave(self, worker: int) -> None:
        """A worker that has joined is gone; after the last, iterations count from 0 again."""
        iterations = self._iterations.pop(worker)
        del self._workers_at[iterations][worker]
        if not self._workers_at[iterations]:
            del self._workers_at[iterations]
        if not self._iterations:
            self.slowest = self.fastest = 0
            return
        while self.slowest not in self._workers_at:
            self.slowest += 1
        while self.fastest not in self._workers_at:
            self.fastest -= 1

    def _put(self, worker: int, iterations: int) -> None:
        self._iterations[worker] = iterations
        self._workers_at[iterations][worker] = None

"""How many iterations each worker has done, and so who is slowest, who fastest, and by how much each leads.

Knows nothing of time, commits or bounds.
"""

from typing import final


@final
class Progress:
    """Iterations of the workers that have joined. No method looks at all of them.

    Each takes constant time, except that `leave` walks from an end of the range of iterations to where it ends without
    the worker, and `last_of_slowest` over workers that are not there any more and which it then forgets: both are paid
    for by the pushes before them. Only `all_slowest` looks at all of them.

    Attributes:
        slowest, fastest: Iterations of the slowest and of the fastest worker, 0 where none has joined; to be read only.
    """

    __slots__ = ("_came_to", "_count_at", "_iterations", "fastest", "slowest")

    def __init__(self) -> None:
        self._iterations: dict[int, int] = {}
        self._count_at: dict[int, int] = {}
        """How many workers are at each iteration that any is at."""
        self._came_to: dict[int, list[int]] = {}
        """Who came to each of these iterations, the last one last; whoever has left it is not taken out."""
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
        came, slowest = self._came_to[self.slowest], self.slowest
        while self._iterations.get(came[-1]) != slowest:
            came.pop()
        return came[-1]

    def all_slowest(self) -> list[int]:
        """The slowest workers, ascending. Looks at all workers."""
        return sorted(worker for worker, done in self._iterations.items() if done == self.slowest)

    def join(self, worker: int) -> None:
        """A worker that had not joined begins level with the slowest; at 0 where there is none."""
        self._put(worker, self.slowest)

    def advance(self, worker: int) -> None:
        """A worker that has joined has done one more iteration."""
        done = self._iterations[worker]
        nobody_left = self._take_from(done)
        self._put(worker, done + 1)
        if done == self.fastest:
            self.fastest += 1
        if nobody_left and done == self.slowest:
            self.slowest += 1  # it alone was the slowest, so that nobody is behind where it is now

    def leave(self, worker: int) -> None:
        """A worker that has joined is gone; after the last, iterations count from 0 again."""
        self._take_from(self._iterations.pop(worker))
        if not self._iterations:
            self.slowest = self.fastest = 0
            return
        while self.slowest not in self._count_at:
            self.slowest += 1
        while self.fastest not in self._count_at:
            self.fastest -= 1

    def _put(self, worker: int, iterations: int) -> None:
        self._iterations[worker] = iterations
        if iterations in self._count_at:
            self._count_at[iterations] += 1
            self._came_to[iterations].append(worker)
        else:
            self._count_at[iterations] = 1
            self._came_to[iterations] = [worker]

    def _take_from(self, iterations: int) -> bool:
        """One worker less is at these; whether none is."""
        left = self._count_at[iterations] - 1
        if left:
            self._count_at[iterations] = left
            return False
        del self._count_at[iterations], self._came_to[iterations]
        return True

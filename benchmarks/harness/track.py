"""What workers that need not wait for each other did, each in its own iterations; and how fast that was in a window."""

from dataclasses import dataclass, field

import numpy as np

BURST = 5
"""After a wait of more than so many of its own iterations a worker's lead is the least that it is held at, each time."""


@dataclass
class Track:
    """One worker's iterations: when each ended, with its weights at hand, its samples and its emulated compute."""

    ended: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)

    def add(self, ended, samples, compute):
        self.ended.append(ended)
        self.samples.append(samples)
        self.compute.append(compute)

    def between(self, start, stop):
        """The iterations that lie wholly between the first and the last end in this window.

        Counted so, and not by the window's own length, an iteration that the window cuts does not count in part. A
        worker that runs in bursts, with long waits in between, is counted from the end of such a wait to the end of
        another, in whole bursts.
        """
        inside = [k for k, ended in enumerate(self.ended) if k and start <= ended <= stop]
        bursts = [k for k in inside if self._waited(k) > BURST * self.compute[k]]
        if len(bursts) > 1:
            inside = bursts
        if len(inside) < 2:
            raise ValueError(f"{len(inside)} iterations ended between {start:g} and {stop:g} s: make the window longer")
        return range(inside[0] + 1, inside[-1] + 1)

    def _waited(self, k):
        return self.ended[k] - self.ended[k - 1] - self.compute[k]

    def pace(self, start, stop):
        """Samples/s in the window."""
        own = self.between(start, stop)
        return sum(self.samples[k] for k in own) / (self.ended[own[-1]] - self.ended[own[0] - 1])

    def busy(self, start, stop):
        """The share of the window that was emulated compute."""
        own = self.between(start, stop)
        return sum(self.compute[k] for k in own) / (self.ended[own[-1]] - self.ended[own[0] - 1])


def pace(tracks, start, stop):
    """Samples/s of all workers in the window."""
    return sum(track.pace(start, stop) for track in tracks)


def waiting_share(tracks, start, stop):
    """What was not compute, of all workers' time: waiting for others, and whatever the exchanges take."""
    return 1.0 - float(np.mean([track.busy(start, stop) for track in tracks]))

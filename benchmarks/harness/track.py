"""What workers that need not wait for each other did, each in its own iterations; and how fast that was in a window."""

from dataclasses import dataclass, field

import numpy as np

HELD = 0.5
"""A worker that waited longer than this part of its compute was held by its bound, and not by its exchange alone."""


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

    def between(self, start, stop, *, held=False):
        """The iterations that lie wholly between the first and the last end in this window.

        Counted so, and not by the window's own length, an iteration that the window cuts does not count in part. With
        `held`, of a worker that was held more than once it is from the end of its first hold to that of its last: its
        lead is then the same at both, whatever bursts it runs in.
        """
        inside = [k for k, ended in enumerate(self.ended) if k and start <= ended <= stop]
        if held:
            holds = [k for k in inside if self.ended[k] - self.ended[k - 1] > (1.0 + HELD) * self.compute[k]]
            inside = holds if len(holds) > 1 else inside
        if len(inside) < 2:
            raise ValueError(f"{len(inside)} iterations ended between {start:g} and {stop:g} s: make the window longer")
        return range(inside[0] + 1, inside[-1] + 1)

    def rate(self, values, own):
        """What the iterations `own` have of this, for each second that they took."""
        return sum(values[k] for k in own) / (self.ended[own[-1]] - self.ended[own[0] - 1])


def pace(tracks, start, stop, *, held=False):
    """Samples/s of all workers in the window."""
    return sum(track.rate(track.samples, track.between(start, stop, held=held)) for track in tracks)


def waiting_share(tracks, start, stop, *, held=False):
    """What was not compute, of all workers' time: waiting for others, and whatever the exchanges take."""
    return 1.0 - float(np.mean([track.rate(track.compute, track.between(start, stop, held=held)) for track in tracks]))

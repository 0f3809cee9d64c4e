"""What a run gained: beside equal sizes behind a barrier, and beside workers that never wait.

Both are worked out from the speeds that the run itself measured, so a run on its own has a speed-up too. A run with
equal sizes, where there is one, is the better witness: its throughput was measured.
"""

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from evenstep.report.clock import Times, times_of
from evenstep.report.iterations import FloatArray, Iterations
from evenstep.report.recorded import RecordedRun

_MOMENTS: Final = 2000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Throughputs in samples per second.

    `equal` is that of equal sizes behind a barrier at the speeds of this run, with its communication. `balanced` is
    that of sizes in proportion to the speeds, with the same communication. `ideal` is the sum of the workers' speeds on
    the sizes that they had: nobody waits, and nothing takes time but computing.
    """

    measured: float
    equal: float
    balanced: float
    ideal: float

    @property
    def speed_up(self) -> float:
        """Over equal sizes."""
        return self.measured / self.equal

    @property
    def left(self) -> float:
        """How many times as much balanced sizes would train as was trained."""
        return self.balanced / self.measured

    @property
    def of_ideal(self) -> float:
        """The part of the ideal that was reached, 0 to 1."""
        return self.measured / self.ideal


def gain_of(run: RecordedRun) -> Gain | None:
    """The gain of a run; None where nothing was measured that would tell.

    Behind a barrier it is worked out iteration by iteration, over those in which every worker computed on samples of
    its own; on servers, where workers do not meet, moment by moment.
    """
    each = [run.iterations[worker] for worker in run.workers]
    equal_size = run.global_batch_size / len(each)
    if run.servers is not None:
        return _gain_apart(run, times_of(run), equal_size)
    length = run.length
    done = [one[:length] for one in each]
    counts = np.all([(one.samples > 0) & (one.compute_seconds > 0) for one in done], axis=0)
    if not counts.any():
        return None
    compute = np.array([one.compute_seconds for one in done])[:, counts]
    iteration = np.max([one.iteration_seconds for one in done], axis=0)[counts]
    samples = np.array([one.samples for one in done])[:, counts]
    at_equal = np.array([_seconds_for(one, equal_size) for one in done])[:, counts]
    # A short last slice would have been short with equal sizes, too.
    at_equal *= samples.sum(axis=0) / (equal_size * len(done))
    around = np.maximum(iteration - compute.max(axis=0), 0.0)
    whole = samples.sum(axis=0)
    together = whole / (samples / compute).sum(axis=0)
    return Gain(
        measured=float(whole.sum() / iteration.sum()),
        equal=float(whole.sum() / (at_equal.max(axis=0) + around).sum()),
        balanced=float(whole.sum() / (together + around).sum()),
        ideal=float(whole.sum() / together.sum()),
    )


def _gain_apart(run: RecordedRun, times: Times, equal_size: float) -> Gain | None:
    ran = {worker: done for worker, done in run.iterations.items() if (done.samples > 0).any()}
    if any(done.compute_seconds.sum() <= 0 for done in ran.values()) or not ran:
        return None
    moments = np.linspace(0.0, times.seconds, _MOMENTS)
    at_equal = []
    for worker, done in ran.items():
        counts = done.samples > 0
        index = np.searchsorted(times.began[worker][counts], moments, side="right") - 1
        at_equal.append(_seconds_for(done, equal_size)[counts][np.maximum(index, 0)])
    around = float(np.mean([(done.comm_seconds + done.input_seconds).mean() for done in ran.values()]))
    longest = max(float(done.iteration_seconds.sum()) for done in run.iterations.values())
    whole = equal_size * len(run.iterations)
    ideal = sum(float(done.samples.sum() / done.compute_seconds.sum()) for done in ran.values())
    return Gain(
        measured=sum(float(done.samples.sum()) for done in run.iterations.values()) / longest,
        equal=whole / (float(np.max(at_equal, axis=0).mean()) + around),
        balanced=whole / (whole / ideal + around),
        ideal=ideal,
    )


def _seconds_for(done: Iterations, size: float) -> FloatArray:
    """What each iteration's compute would have taken with this many samples; shape [iterations]."""
    fixed = np.minimum(done.fixed, done.compute_seconds)
    return fixed + (done.compute_seconds - fixed) * size / np.maximum(done.samples, 1.0)

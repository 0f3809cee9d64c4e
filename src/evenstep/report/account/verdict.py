"""The verdict on a run behind a barrier: the gain from its sizes, which worker is slow, why, and the cost of that.

A worker is late at a barrier because it computes longer, because it waits for its input, or because its script does
something else. A different batch size only helps in the first case, so the cause is determined first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from evenstep.report.account.account import OWN, Account, Part, known_scheme
from evenstep.report.account.gain import Interval
from evenstep.schemes import Scheme

PLAIN: Final = "bsp"
"""The scheme with equal sizes behind a barrier, like plain DistributedDataParallel."""
COSTLY: Final = 0.03
"""The least share of the workers' time for which a cause is worth a change."""
SLOW: Final = 1.15
"""A worker is called slow from this many times the median's seconds per sample."""
SPREAD: Final = 0.15
"""The share of waiting that is worth another scheme, even if no single worker causes it."""
_FEWEST: Final = 10
"""The least iterations from which the width of the interval can be predicted."""

WHY: Final = {
    Part.INPUT: "waits for its input",
    Part.SCRIPT: "spends time between its iterations",
    Part.COMMUNICATION: "takes longer to push and pull",
}
_CURE: Final = {
    Part.INPUT: "batch sizes cannot help that, more data workers (num_workers) can",
    Part.SCRIPT: "look at what the script does there on this worker alone, such as logging or saving",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verdict on a run.

    Attributes:
        worker: The slow worker; None if no worker is slow, or if communication slows all equally.
        cause: The cause of its slowness; None if no worker is slow.
        slowdown: Its seconds per sample over the median of the others', at equal sizes; for other causes than compute,
            its own seconds per iteration over theirs. None if not measured.
        cost: The share of all workers' time spent waiting for it, 0 to 1.
        decided: Whether the run was long enough for a verdict.
        sizes_may_help: Whether sizes by speed, which the run did not have, may help against its waiting.
        text: The verdict in one to three sentences.
    """

    worker: int | None = None
    cause: Part | None = None
    slowdown: float | None = None
    cost: float = 0.0
    decided: bool = True
    sizes_may_help: bool = False
    text: str


def verdict_of(account: Account, workers: Sequence[int], scheme: str, *, longer: Account | None = None) -> Verdict:
    """The verdict on a run under this scheme; `workers` are the ranks of the account's workers, in its order.

    If the account has few iterations, the gain from sizes and the slowness of each worker come from a `longer` account
    of the same run, because few iterations measure them.
    """
    measured = longer or account
    more = missing_iterations(measured)
    if more:
        return undecided(measured.iterations, measured.seconds, more)
    if len(workers) == 1:
        return _alone(account, workers[0])
    verdict, gain = _verdict(account, measured, workers, known_scheme(scheme)), measured.gain.speed_up
    if scheme == PLAIN:
        return replace(verdict, sizes_may_help=verdict.cause in (None, Part.COMPUTE))
    told = verdict.worker is not None and verdict.cause is Part.COMPUTE and measured.uneven
    if told or gain.low <= 1 <= gain.high or abs(gain.estimate - 1) < 0.02:  # Too little to mention.
        return verdict
    return replace(verdict, text=f"{_gained(gain)}. {verdict.text}")


def missing_iterations(account: Account) -> int:
    """The approximate number of iterations still needed to know the gain from sizes and the waiting; 0 if none."""
    done = account.iterations
    if not done or account.workers == 1:
        return max(_FEWEST - done, 0)
    gain, waits = account.gain.speed_up_if_known, account.gain.waits
    reach = (waits.high - waits.low) / 2
    if gain.low < 1 < gain.high:
        reach = max(reach, (gain.high - gain.low) / 2)
    # An interval is narrow enough if it extends at most 0.1 from its middle.
    more = max(_FEWEST - done, done * ((reach / 0.1) ** 2 - 1), 0.0)
    digit = 10 ** max(len(str(int(more))) - 1, 0)
    return int(np.ceil(more / digit) * digit)


def undecided(iterations: int, seconds: float, more: int) -> Verdict:
    """The verdict on a run that is too short for one."""
    would = "1 more iteration" if more == 1 else f"{more:,} more iterations"
    text = f"Too short for a verdict: {counted(iterations)} in {duration(seconds)}; about {would} would tell."
    return Verdict(decided=False, text=text)


def no_worker_slow(waiting: float) -> Verdict:
    """The verdict on a run without a slow worker."""
    return Verdict(cost=waiting, text=f"No worker is slow: waiting takes {waiting:.0%} of all workers' time.")


def spread(waiting: float, slowest: float | None, *, barrier: bool = True, lost: bool = False) -> Verdict:
    """The verdict on much waiting without a single cause; `lost`: some of it may have been for lost workers."""
    whom = "part of it until lost workers were given up" if lost else "now for one worker and then for another"
    text = f"Waiting takes {waiting:.0%} of all workers' time, {whom}."
    if barrier:
        text += " Without a barrier (asp, ssp, dssp) no worker waits for slowness that passes quickly."
    return Verdict(cause=Part.COMPUTE, slowdown=slowest, cost=waiting, text=text)


def _alone(account: Account, worker: int) -> Verdict:
    share = float(account.own[OWN.index(Part.INPUT), 0]) / max(account.seconds, 1e-12)
    if share < COSTLY:
        return Verdict(text="One worker has no other to wait for.")
    text = f"One worker, which waits for its input {share:.0%} of its time: more data workers (num_workers) would help."
    return Verdict(worker=worker, cause=Part.INPUT, cost=share, text=text)


def _verdict(account: Account, measured: Account, workers: Sequence[int], scheme: Scheme) -> Verdict:
    blame = account.blame / account.all_time
    index, part = np.unravel_index(int(blame.argmax()), blame.shape)
    cost, waiting, cause = float(blame[index, part]), float(blame.sum()), OWN[part]
    communication = float(account.comm.sum()) / account.all_time
    # In the first 10 s connections have only just been made, and their cost is not worth a change.
    if communication >= 0.25 and communication > cost and account.seconds >= 10.0:
        less = "Larger batches, or a longer period," if scheme.period else "Larger batches, or local-sgd,"
        text = (
            f"Communication takes {communication:.0%} of all workers' time, on all alike; waiting for each other takes"
            f" {waiting:.0%}. {'Larger batches' if account.elastic else less} communicate less often."
            f"{_accumulation(account, scheme)}"
        )
        return Verdict(cause=Part.COMMUNICATION, cost=communication, text=text)
    if cost < max(COSTLY, 0.2 * waiting):  # No worker is the main cause.
        return _balanced(measured, workers, scheme, waiting)
    if cause is Part.COMPUTE:
        return _slow(measured, workers, scheme, int(index), cost, waiting)
    worker, own = workers[int(index)], account.own.sum(axis=0)
    others = float(np.median(np.delete(own, int(index))))
    text = f"Worker {worker} {WHY[cause]}, and all wait for it {cost:.0%} of their time: {_CURE[cause]}."
    return Verdict(worker=worker, cause=cause, slowdown=float(own[index]) / (others or 1.0), cost=cost, text=text)


def _balanced(account: Account, workers: Sequence[int], scheme: Scheme, waiting: float) -> Verdict:
    """The verdict on little waiting for any worker: sizes balance it, none is slow, or different workers take turns."""
    slow = account.slowdowns()
    index = max(slow, key=lambda each: slow[each])
    if waiting >= SPREAD:
        return spread(waiting, slow[index], barrier=not account.elastic)
    return no_worker_slow(waiting) if slow[index] < SLOW else _slow(account, workers, scheme, index, waiting, waiting)


def _slow(account: Account, workers: Sequence[int], scheme: Scheme, index: int, cost: float, waiting: float) -> Verdict:
    """The verdict on one worker that computes longer than the others; `waiting` is for all of them."""
    slow = account.slowdowns()[index]
    if slow < SLOW:
        return _balanced(account, workers, scheme, waiting)
    last = account.last_sizes
    equal = round(sum(last) / len(last))  # The first sizes may follow speed already.
    instead = "" if last[index] == equal else f" instead of {equal}"
    who = f"orker {workers[index]} computes {times(slow)} slower"
    gets = f"gets {last[index]} of {sum(last)} samples{instead}"
    waits = f"waiting for it takes {cost:.0%} of all workers' time"
    if account.uneven:
        before, after = account.gain.equal_waits, account.waiting
        went = f"waiting {'fell' if after < before else 'went'} from {before:.0%} to {after:.0%} of all workers' time"
        text = f"{_gained(account.gain.speed_up)}: w{who} and {gets}; {went}."
    elif scheme.load.follows_speed or scheme.steps == "speed":  # It already gives it less.
        text = f"W{who} and {gets}; {waits}."
    else:
        load = "load=lb-bsp" if scheme.period else "lb-bsp"
        text = f"W{who}, and {waits}; {load} would give it smaller batches."
    if not account.uneven:
        text += _accumulation(account, scheme)
    return Verdict(worker=workers[index], cause=Part.COMPUTE, slowdown=slow, cost=cost, text=text)


def times(factor: float) -> str:
    """A factor in short form: `3x`, `1.4x`."""
    return f"{factor:.1f}".removesuffix(".0") + "x"


def counted(iterations: int) -> str:
    """A number of iterations in words: `1 iteration`, `1,200 iterations`."""
    return f"{iterations:,} iteration" + ("" if iterations == 1 else "s")


def duration(seconds: float) -> str:
    """Seconds in words: `44.1 s`, `12 min`, `3.5 h`."""
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _accumulation(account: Account, scheme: Scheme) -> str:
    """Advice for batches that are too small to be divided by speed; nothing for others."""
    if account.elastic or max(account.last_sizes) > 4 or scheme.micro_batch:
        return ""
    return (
        " Batches this small are hardly divided by speed: if the script accumulates A of them for a step, give prepare"
        " accumulation=A."
    )


def _gained(speed_up: Interval) -> str:
    if speed_up.high > 1.6 * speed_up.low:  # Too wide for an estimate.
        return f"Training is {speed_up.ends} times as fast as with equal sizes (95% interval)"
    interval = f" (95% interval {speed_up.ends})" if speed_up.ends else ""
    slower = "slower than with equal sizes, " if speed_up.high < 1 else ""
    than = "" if slower else " as with equal sizes"
    return f"Training is {slower}{speed_up.estimate:.2f} times as fast{than}{interval}"


# The summary at the end of a run, for the terminal.


def summary_lines(account: Account, scheme: str, verdict: Verdict) -> list[str]:
    """Describe a run behind a barrier in two to five lines."""
    first, last = account.first_sizes, account.last_sizes
    sizes = sizes_text(last) if last == first else f"{sizes_text(first)} at first, {sizes_text(last)} at the end"
    head = head_text(scheme, account.workers, account.seconds, float(account.samples.sum()))
    if account.workers == 1 and verdict.cause is not Part.INPUT:
        return [f"{head}."]
    return [f"{head}; batch sizes {sizes}.", *sentences(verdict.text)]


def head_text(scheme: str, workers: int, seconds: float, samples: float) -> str:
    """The speed of a run, as text."""
    who = "1 worker" if workers == 1 else f"{workers:,} workers"
    return f"{scheme} trained {samples / max(seconds, 1e-9):,.0f} samples/s for {duration(seconds)} on {who}"


def sizes_text(sizes: Sequence[int]) -> str:
    """Batch sizes as text, or their range if there are more than eight."""
    return " ".join(map(str, sizes)) if len(sizes) <= 8 else f"from {min(sizes)} to {max(sizes)}"


def sentences(text: str) -> list[str]:
    """Split a text into sentences, one per line."""
    return [f"{sentence.rstrip('.')}." for sentence in text.split(". ") if sentence]

"""The verdict on a run behind a barrier: what its sizes gained, which worker is slow, why, and what that costs.

A worker is late at a barrier because it computes longer, because it waits for its data, or because its script does
something else; only the first can be helped by another batch size, so the cause is found before anything is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from evenstep.core.account.account import Account
from evenstep.core.account.cause import Cause
from evenstep.core.account.comparisons import Interval
from evenstep.core.account.length import long_enough, too_short
from evenstep.core.account.meetings import OWN


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What there is to say of a run.

    Attributes:
        worker: The slow worker; None where none is, and where all alike are held up by communication.
        cause: Why it is slow; None where no worker is.
        slowdown: Its seconds per sample over the median of the others', measured at equal sizes; for other causes than
            compute its own seconds per iteration over theirs. None where that was not measured.
        cost: The part of all workers' time that is spent waiting for it, 0 to 1.
        text: The verdict in one to three sentences.
    """

    worker: int | None
    cause: Cause | None
    slowdown: float | None
    cost: float
    text: str


COSTLY: Final = 0.03
"""A cause that takes a smaller part of the workers' time is not worth a change."""
SLOW: Final = 1.15
"""A worker that needs this many times the median's seconds per sample is called slow."""
SPREAD: Final = 0.15
"""Waiting from this part of the time on is worth a change of the scheme, also where no single worker causes it."""
_MAIN: Final = 0.2
"""A worker that causes a smaller part of the waiting than this is not named for it."""
_COMMUNICATION: Final = 0.25


def verdict_of(account: Account, workers: Sequence[int], scheme: str, *, longer: Account | None = None) -> Verdict:
    """The verdict on a run under this scheme; `workers` are the ranks of those in the account, in its order.

    Where the account is of a few iterations, a `longer` one of the same run tells what they gained and how slow each
    worker is, which is measured in few iterations alone.
    """
    measured = longer or account
    if not long_enough(measured.iterations, measured.seconds):
        return undecided(measured.iterations, measured.seconds)
    if len(workers) == 1:
        return _alone(account, workers[0])
    verdict = _verdict(account, measured, workers, scheme)
    gain = measured.speed_up if measured.waiting_after is not None else None
    if gain is None or (verdict.worker is not None and verdict.cause is Cause.COMPUTE):  # Which tells the gain itself.
        return verdict
    return replace(verdict, text=f"{_gained(gain)}. {verdict.text}")


def undecided(iterations: int, seconds: float) -> Verdict:
    """What there is to say of a run that is too short to be judged."""
    return Verdict(worker=None, cause=None, slowdown=None, cost=0.0, text=too_short(iterations, seconds))


def _verdict(account: Account, measured: Account, workers: Sequence[int], scheme: str) -> Verdict:
    blame = account.blame_shares
    index, part = np.unravel_index(int(blame.argmax()), blame.shape)
    cost, waiting, cause = float(blame[index, part]), float(blame.sum()), OWN[part]
    communication = account.communication_share
    if communication >= _COMMUNICATION and communication > cost:
        return _communication(communication, waiting)
    if cost < max(COSTLY, _MAIN * waiting):
        return _balanced(measured, workers, scheme, waiting)
    if cause is Cause.COMPUTE:
        return _slow(measured, workers, scheme, int(index), cost, waiting)
    worker, own = workers[int(index)], account.own.sum(axis=0)
    others = float(np.median(np.delete(own, int(index))))
    text = f"Worker {worker} {WHY[cause]}, and all wait for it {cost:.0%} of their time: {CURE[cause]}."
    return Verdict(worker=worker, cause=cause, slowdown=float(own[index]) / (others or 1.0), cost=cost, text=text)


def _communication(share: float, waiting: float) -> Verdict:
    """Communication takes more of the time than waiting for any worker."""
    text = (
        f"Communication takes {share:.0%} of all workers' time, on all alike; waiting for each other takes"
        f" {waiting:.0%}. Larger batches, or local-sgd, communicate less often."
    )
    return Verdict(worker=None, cause=Cause.COMMUNICATION, slowdown=None, cost=share, text=text)


WHY: Final = {
    Cause.INPUT: "waits for its input",
    Cause.SCRIPT: "spends time between its iterations",
    Cause.COMMUNICATION: "takes longer to push and pull",
}
CURE: Final = {
    Cause.INPUT: "batch sizes cannot help that, more data workers (num_workers) can",
    Cause.SCRIPT: "look at what the script does there on this worker alone, such as logging or saving",
}


def times(factor: float) -> str:
    """A factor as short as it can be read: `3x`, `1.4x`."""
    return f"{factor:.1f}".removesuffix(".0") + "x"


def spread(waiting: float, slowest: float | None, *, barrier: bool = True, lost: bool = False) -> Verdict:
    """Much waiting that no single worker causes; or that may be for workers that were `lost`, until they were."""
    whom = "part of it until lost workers were given up" if lost else "now for one worker and then for another"
    text = f"Waiting takes {waiting:.0%} of all workers' time, {whom}."
    if barrier:
        text += " Without a barrier (asp, ssp, dssp) no worker waits for slowness that passes quickly."
    return Verdict(worker=None, cause=Cause.COMPUTE, slowdown=slowest, cost=waiting, text=text)


def _alone(account: Account, worker: int) -> Verdict:
    share = float(account.own[OWN.index(Cause.INPUT), 0]) / max(account.seconds, 1e-12)
    if share < COSTLY:
        return Verdict(worker=None, cause=None, slowdown=None, cost=0.0, text="One worker has no other to wait for.")
    text = f"One worker, which waits for its input {share:.0%} of its time: more data workers (num_workers) would help."
    return Verdict(worker=worker, cause=Cause.INPUT, slowdown=None, cost=share, text=text)


def _balanced(account: Account, workers: Sequence[int], scheme: str, waiting: float) -> Verdict:
    """No worker is waited for much: sizes have evened it out, none is slow, or one after another is for a while."""
    slow = account.slowdowns()
    index = max(slow, key=lambda each: slow[each], default=None)
    if waiting >= SPREAD:
        return spread(waiting, None if index is None else slow[index])
    if account.waiting_after is not None and (index is None or slow[index] >= SLOW):
        return _slow(account, workers, scheme, _smallest(account) if index is None else index, waiting, waiting)
    if index is None or slow[index] < SLOW:
        text = f"No worker is slow: waiting takes {waiting:.0%} of all workers' time."
        return Verdict(worker=None, cause=None, slowdown=None, cost=waiting, text=text)
    return _slow(account, workers, scheme, index, waiting, waiting)


def _slow(account: Account, workers: Sequence[int], scheme: str, index: int, cost: float, waiting: float) -> Verdict:
    """One worker computes longer than the others; `waiting` is for all of them."""
    slow = account.slowdowns().get(index)
    if slow is not None and slow < SLOW:
        return spread(waiting, slow)
    worker = workers[index]
    if account.waiting_after is None:
        waits = f"waiting for it takes {cost:.0%} of all workers' time"
        text = f"Worker {worker} {_computes(slow)} and gets {_part(account, index)}; {waits}."
        if not _balances(scheme):
            load = "load=lb-bsp" if scheme.startswith("local-sgd") else "lb-bsp"
            text = f"Worker {worker} {_computes(slow)}, and {waits}; {load} would give it smaller batches."
    elif account.speed_up is None:
        text = (
            f"Worker {worker} {_computes(slow)}: it gets {_part(account, index)}, and waiting takes"
            f" {waiting:.0%} of all workers' time. Too few iterations had equal sizes to tell what that"
            " gains."
        )
    else:
        text = (
            f"{_gained(account.speed_up)}: worker {worker} {_computes(slow)} and gets {_part(account, index)};"
            f" {_waiting(account)}."
        )
    return Verdict(worker=worker, cause=Cause.COMPUTE, slowdown=slow, cost=cost, text=text)


def _balances(scheme: str) -> bool:
    """Whether the scheme itself gives slow workers less, so that it need not be advised to."""
    return any(name in scheme for name in ("lb-bsp", "dbs"))


def _smallest(account: Account) -> int:
    return account.last_sizes.index(min(account.last_sizes))


def _computes(slow: float | None) -> str:
    return "computes longest for a sample" if slow is None else f"computes {times(slow)} slower"


def _part(account: Account, index: int) -> str:
    """What of a global batch a worker gets now, and what it got."""
    first, last = account.first_sizes, account.last_sizes
    instead = "" if first[index] == last[index] else f" instead of {first[index]}"
    return f"{last[index]} of {sum(last)} samples{instead}"


def _waiting(account: Account) -> str:
    before, after = account.waiting_before, account.waiting_after
    if before is None or after is None:
        return f"waiting takes {account.waiting_share:.0%} of all workers' time"
    went = "fell" if after < before else "went"
    return f"waiting {went} from {before:.0%} to {after:.0%} of all workers' time"


def _gained(speed_up: Interval) -> str:
    """What the sizes gained, with its interval."""
    interval = f" (95% interval {speed_up.ends})" if speed_up.ends else ""
    if speed_up.high < 1:
        return f"Training is slower than with equal sizes, {speed_up.estimate:.2f} times as fast{interval}"
    noise = "" if speed_up.low > 1 else ", which may be noise"
    return f"Training is {speed_up.estimate:.2f} times as fast as with equal sizes{interval}{noise}"

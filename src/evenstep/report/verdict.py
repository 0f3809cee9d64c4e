"""The verdict on a run, in one line: who is slow, why, what it costs, and what was done about it.

A pure function of the events. A worker is late at a barrier because it computes longer, because it waits for its data,
or because its script does something else; only the first can be helped by another batch size, so the reason is found
before anything is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.report.gain import Gain, gain_of
from evenstep.report.iterations import Iterations
from evenstep.report.lateness import OWN, Cause, own_parts
from evenstep.report.recorded import RecordedRun


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What there is to say of a run.

    `worker` is the slow one and `cause` why; None where nobody is. (Behind a barrier a transfer is everybody's: then
    there is a cause and no worker.) `slowdown` is its seconds per sample over the median of the others', for compute,
    and its own seconds per iteration over theirs for the rest. `cost` is the part of all workers' time that goes on
    waiting for it, 0 to 1. `text` is the line.
    """

    worker: int | None
    cause: Cause | None
    slowdown: float
    cost: float
    text: str


COSTLY: Final = 0.03
"""A cause that takes a smaller part of the workers' time is not worth a change."""
SLOW: Final = 1.15
"""A worker that needs this many times the median's seconds per sample is called slow."""
_MAIN: Final = 0.2
"""Who causes a smaller part of the waiting than this is not the one to be named for it."""
_SPREAD: Final = 0.15
_TRANSFER_SHARE: Final = 0.25


def verdict_of(run: RecordedRun) -> Verdict:
    """The verdict on all that was recorded of a run."""
    if len(run.workers) == 1:
        return _alone(run)
    return _on_servers(run) if run.servers is not None else _behind_a_barrier(run)


def paces(run: RecordedRun) -> dict[int, float]:
    """Each worker's measured seconds per sample; of those that computed on any."""
    done = ((worker, run.iterations[worker]) for worker in run.workers)
    return {
        worker: float(each.compute_seconds.sum() / each.samples.sum()) for worker, each in done if each.samples.sum()
    }


def slowness(run: RecordedRun) -> dict[int, float]:
    """Each worker's seconds per sample over the median of the others'."""
    return _over_others(paces(run))


def _over_others(values: Mapping[int, float]) -> dict[int, float]:
    """Each value over the median of the others; 1 where there is nothing to compare with."""
    each = np.array(list(values.values()))
    usual = (float(np.median(np.delete(each, index))) if len(each) > 1 else 0.0 for index in range(len(each)))
    return {worker: values[worker] / other if other else 1.0 for worker, other in zip(values, usual, strict=True)}


def _alone(run: RecordedRun) -> Verdict:
    done = run.iterations[run.workers[0]]
    share = float(done.input_seconds.sum() / done.iteration_seconds.sum())
    if share < COSTLY:
        return Verdict(
            worker=None, cause=None, slowdown=1.0, cost=0.0, text="One worker, which has nobody to wait for."
        )
    text = f"One worker, which waits for its input {share:.0%} of its time: more data workers (num_workers) would help."
    return Verdict(worker=run.workers[0], cause=Cause.INPUT, slowdown=1.0, cost=share, text=text)


def _behind_a_barrier(run: RecordedRun) -> Verdict:
    done = [run.iterations[worker][: run.length] for worker in run.workers]
    total = sum(float(each.iteration_seconds.sum()) for each in done)
    blame = _blame(done) / total
    index, part = np.unravel_index(int(blame.argmax()), blame.shape)
    cost, cause = float(blame[index, part]), OWN[part]
    transfer = sum(float(each.comm_seconds.sum()) for each in done) / total
    gain = gain_of(run)
    if transfer >= _TRANSFER_SHARE and transfer > cost:
        text = (
            f"Transfer takes {transfer:.0%} of all workers' time, on all alike; waiting for each other takes"
            f" {float(blame.sum()):.0%}. Larger batches, or local-sgd, communicate less often."
        )
        return Verdict(worker=None, cause=Cause.TRANSFER, slowdown=1.0, cost=transfer, text=text)
    if cost >= max(COSTLY, _MAIN * float(blame.sum())):
        worker = run.workers[int(index)]
        own = {each: float(own_parts(run.iterations[each]).sum(axis=0).mean()) for each in run.workers}
        return _late(run, worker, cause, cost, gain, _over_others(own)[worker])
    return _balanced(run, float(blame.sum()), gain)


def _blame(done: list[Iterations]) -> npt.NDArray[np.float64]:
    """Seconds that all have waited for each worker by cause; shape [workers, causes]."""
    parts = np.stack([own_parts(each) for each in done], axis=1)
    latest = parts.sum(axis=0).argmax(axis=0)
    numbers = np.arange(parts.shape[2])
    excess = parts[:, latest, numbers] - np.median(parts, axis=1)
    why = excess.argmax(axis=0)
    waited = np.sum([each.wait_seconds for each in done], axis=0)
    blame = np.zeros((len(done), len(OWN)))
    np.add.at(blame, (latest, why), waited)
    return blame


def _late(run: RecordedRun, worker: int, cause: Cause, cost: float, gain: Gain | None, ratio: float) -> Verdict:
    slow = slowness(run).get(worker, 1.0)
    if cause is Cause.COMPUTE:
        if slow < SLOW:
            return _spread(_waiting_share(run), slow)
        text = (
            f"Worker {worker} computes {_times(slow)} slower, and waiting for it takes {cost:.0%} of all workers' time"
        )
        return Verdict(
            worker=worker, cause=cause, slowdown=slow, cost=cost, text=f"{text}{_about_sizes(run, worker, gain)}"
        )
    why, cure = {
        Cause.INPUT: ("waits for its input", "batch sizes cannot help that, more data workers (num_workers) can"),
        Cause.SCRIPT: (
            "spends time between its iterations",
            "look at what the script does there on this worker alone, such as logging or saving",
        ),
    }[cause]
    text = f"Worker {worker} {why}, and all wait for it {cost:.0%} of their time: {cure}."
    return Verdict(worker=worker, cause=cause, slowdown=ratio, cost=cost, text=text)


def _about_sizes(run: RecordedRun, worker: int, gain: Gain | None) -> str:
    sizes = [plan[worker] for plan in run.plans]
    if len(set(sizes)) > 1 and gain is not None:
        went = f"went from {sizes[0]} to {sizes[-1]}"
        if sizes[0] == sizes[-1]:  # It was slow for a while.
            went = f"was between {min(sizes)} and {max(sizes)}"
        return f": its batch {went} samples, {gain.speed_up:.2f} times as fast as equal sizes."
    if gain is not None and gain.left > 1 + COSTLY:
        return f". With sizes by speed (lb-bsp) up to {gain.left:.2f} times as much could be trained."
    return "."


def _balanced(run: RecordedRun, waiting: float, gain: Gain | None) -> Verdict:
    """Nobody is waited for much: sizes have evened it out, nobody is slow, or one after another is for a while."""
    slow = slowness(run)
    worker = max(slow, key=lambda each: slow[each], default=None)
    if waiting >= _SPREAD:
        return _spread(waiting, None if worker is None else slow[worker])
    if worker is None or slow[worker] < SLOW:
        text = f"Nobody is slow: waiting takes {waiting:.0%} of all workers' time."
        return Verdict(worker=None, cause=None, slowdown=1.0, cost=waiting, text=text)
    text = (
        f"Worker {worker} computes {_times(slow[worker])} slower, yet waiting takes only {waiting:.0%} of all workers'"
    )
    sizes = _about_sizes(run, worker, gain) if len(set(run.plans)) > 1 else "."
    return Verdict(worker=worker, cause=Cause.COMPUTE, slowdown=slow[worker], cost=waiting, text=f"{text} time{sizes}")


def _spread(waiting: float, slowest: float | None) -> Verdict:
    text = (
        f"Waiting takes {waiting:.0%} of all workers' time, now for one and then for another. Without a barrier (asp,"
        " ssp, dssp) nobody waits for slowness that passes quickly."
    )
    return Verdict(worker=None, cause=Cause.COMPUTE, slowdown=slowest or 1.0, cost=waiting, text=text)


def _on_servers(run: RecordedRun) -> Verdict:
    done = {worker: run.iterations[worker] for worker in run.workers}
    parts = {
        Cause.COMPUTE: {worker: float(each.compute_seconds.mean()) for worker, each in done.items()},
        Cause.INPUT: {worker: float(each.input_seconds.mean()) for worker, each in done.items()},
        Cause.SCRIPT: {worker: float(each.rest_seconds.mean()) for worker, each in done.items()},
        Cause.TRANSFER: {worker: float(each.comm_seconds.mean()) for worker, each in done.items()},
    }
    own = {worker: sum(part[worker] for part in parts.values()) for worker in done}
    worker = max(own, key=lambda each: own[each])
    ratio = _over_others(own)[worker]
    cost = _waiting_share(run)
    pace = slowness(run)
    slowest = max(pace, key=lambda each: pace[each], default=worker)
    if ratio < SLOW and pace.get(slowest, 1.0) < SLOW:
        if cost >= _SPREAD:
            return _spread(cost, pace.get(slowest))
        text = f"Nobody is slow: workers were held {cost:.0%} of their time."
        return Verdict(worker=None, cause=None, slowdown=1.0, cost=cost, text=text)
    cause = max(parts, key=lambda each: parts[each][worker] - median(parts[each].values()))
    if ratio < SLOW:  # Sizes have evened out what it needs for a sample.
        worker, cause = slowest, Cause.COMPUTE
    slow = pace[worker] if cause is Cause.COMPUTE and worker in pace else ratio
    why = {
        Cause.COMPUTE: f"computes {_times(slow)} slower",
        Cause.INPUT: "waits for its input",
        Cause.SCRIPT: "spends time between its iterations",
        Cause.TRANSFER: "takes longer to push and pull",
    }[cause]
    lead = int(max(np.nan_to_num(each.lead).max(initial=0.0) for each in done.values()))
    ahead = f"ran up to {lead} iterations ahead" if lead else ""
    if cost >= COSTLY:
        others = f"the others were held for it {cost:.0%} of all workers' time" + (f", and {ahead}" if ahead else "")
    else:
        others = f"the others do not wait for it, and {ahead}" if ahead else "nobody waits for it"
    return Verdict(worker=worker, cause=cause, slowdown=slow, cost=cost, text=f"Worker {worker} {why}; {others}.")


def _waiting_share(run: RecordedRun) -> float:
    waited = sum(float(each.wait_seconds.sum()) for each in run.iterations.values())
    return waited / sum(float(each.iteration_seconds.sum()) for each in run.iterations.values())


def _times(factor: float) -> str:
    return f"{factor:.1f}".removesuffix(".0") + "x"

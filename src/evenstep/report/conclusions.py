"""The conclusions from a recorded run: its account, from the columns of every worker, and the verdict on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.account.account import Account, Meetings, Part
from evenstep.report.account.gain import Interval
from evenstep.report.account.served import (
    ServedWorker,
    common_paces,
    served_long_enough,
    served_slowdowns,
    served_verdict,
)
from evenstep.report.account.verdict import Verdict, missing_iterations, verdict_of
from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """The verdict on a run, and its basis.

    `speed_up` is the factor by which the run was faster than with equal sizes; None if it was too short to tell, and on
    servers. `slowdowns` are workers' seconds per sample over the median of the others', at equal sizes; empty if not
    measured. `elasticities` are the parts of all workers' times that depend on their batch sizes, 0 to 1.
    """

    verdict: Verdict
    speed_up: Interval | None
    slowdowns: Mapping[int, float]
    elasticities: Mapping[int, float]


def conclusions_of(run: RecordedRun) -> Conclusions:
    """The conclusions from a whole run."""
    if run.servers is not None:
        workers = served_workers(run)
        return Conclusions(
            verdict=served_verdict(workers),
            speed_up=None,
            slowdowns=served_slowdowns(workers) if served_long_enough(workers) else {},
            elasticities=dict.fromkeys(run.workers, 1.0),
        )
    account, there = account_of(run), list(run.counted)
    judged = not missing_iterations(account)
    known = dict(zip(there, account.gain.elasticity.medians.tolist(), strict=True))
    return Conclusions(
        verdict=verdict_of(account, there, run.scheme),
        speed_up=account.gain.speed_up if judged else None,
        slowdowns={there[index]: ratio for index, ratio in account.slowdowns().items()} if judged else {},
        elasticities=dict.fromkeys(run.workers, 1.0) | known,
    )


def account_of(run: RecordedRun) -> Account:
    """The account of a run behind a barrier, over the iterations that all workers have finished."""
    done = list(run.counted.values())
    account = Account(len(done), run.global_batch_size, run.scheme, elastic=run.elastic is not None)
    account.take(
        Meetings(
            samples=np.array([each.samples for each in done]),
            measured=np.array([each.measured for each in done]),
            own=np.stack([each.own_parts for each in done], axis=1),
            wait=np.array([each.wait_seconds for each in done]),
            comm=np.array([each.comm_seconds for each in done]),
            seconds=done[0].seconds_since_meeting,  # Like the summary at the end of the run.
        )
    )
    return account


def served_workers(run: RecordedRun) -> list[ServedWorker]:
    """All workers of a run on servers, each over all of its iterations."""
    done = run.counted
    paces = common_paces({worker: _by_size(each) for worker, each in done.items()}, run.global_batch_size / len(done))
    return [
        ServedWorker(
            worker=worker,
            iterations=len(each),
            seconds=float(each.iteration_seconds.sum()),
            compute=float(each.compute_seconds.sum()),
            wait=float(each.wait_seconds.sum()),
            rest={
                Part.INPUT: float(each.input_seconds.sum()),
                Part.SCRIPT: float(each.rest_seconds.sum()),
                Part.COMMUNICATION: float(each.comm_seconds.sum()),
            },
            lead=int(np.nan_to_num(each.lead).max()),
            pace=paces.get(worker),
            lost=run.absent.get(worker),
        )
        for worker, each in done.items()
    ]


def _by_size(done: Iterations) -> dict[float, tuple[int, float]]:
    """The number of iterations of each batch size, and their seconds of compute."""
    sizes, at = np.unique(done.samples, return_inverse=True)
    seconds = np.bincount(at, weights=done.compute_seconds)
    return dict(zip(sizes.tolist(), zip(np.bincount(at).tolist(), seconds.tolist(), strict=True), strict=True))

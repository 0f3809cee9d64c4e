"""The account of a recorded run, from the columns of every worker."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from evenstep.core.supervision import Why
from evenstep.report.account import EARLY, Account, Cause, Meetings, ServedWorker
from evenstep.report.iterations import FloatArray, Iterations
from evenstep.report.recorded import RecordedRun
from evenstep.telemetry.events import Joined

_MIN_ITERATIONS: Final = 3


def account_of(run: RecordedRun) -> Account:
    """The account of a run behind a barrier, over the iterations that every worker has finished."""
    done = list(run.counted.values())
    account = Account(len(done), run.global_batch_size)
    account.take(
        Meetings(
            samples=np.array([each.samples for each in done]),
            measured=np.array([each.measured for each in done]),
            own=np.stack([each.own_parts for each in done], axis=1),
            wait=np.array([each.wait_seconds for each in done]),
            comm=np.array([each.comm_seconds for each in done]),
            seconds=done[0].iteration_seconds,  # As in the summary at the end of the run.
        )
    )
    return account


def served_workers(run: RecordedRun) -> list[ServedWorker]:
    """Every worker of a run on servers, over all of its iterations."""
    done = run.counted
    paces = _common_paces(run, done)
    lost = _lost(run)
    return [
        ServedWorker(
            worker=worker,
            iterations=len(each),
            seconds=float(each.iteration_seconds.sum()),
            compute=float(each.compute_seconds.sum()),
            wait=float(each.wait_seconds.sum()),
            rest={
                Cause.INPUT: float(each.input_seconds.sum()),
                Cause.SCRIPT: float(each.rest_seconds.sum()),
                Cause.COMMUNICATION: float(each.comm_seconds.sum()),
            },
            lead=int(np.nan_to_num(each.lead).max()),
            pace=paces.get(worker),
            lost=lost.get(worker),
        )
        for worker, each in done.items()
    ]


def _common_paces(run: RecordedRun, done: Mapping[int, Iterations]) -> dict[int, float]:
    """Seconds per sample in iterations of an equal share, or in all if the workers' usual sizes are alike."""
    share = run.global_batch_size / len(done)
    paces = {worker: _pace(each, _about(each.samples, share)) for worker, each in done.items()}
    if None in paces.values():
        usual = np.array([np.median(each.samples) for each in done.values()])
        if _about(usual, float(usual.mean())).all():
            paces = {worker: _pace(each, each.samples > 0) for worker, each in done.items()}
    return {worker: pace for worker, pace in paces.items() if pace is not None}


def _about(sizes: FloatArray, share: float) -> npt.NDArray[np.bool_]:
    return np.abs(sizes - share) * 8 <= share


def _pace(done: Iterations, counts: npt.NDArray[np.bool_]) -> float | None:
    if counts.sum() < _MIN_ITERATIONS:
        return None
    return float(done.compute_seconds[counts].sum() / done.samples[counts].sum())


def _lost(run: RecordedRun) -> dict[int, str]:
    """Why workers left for good before the end."""
    if run.servers is None:
        return {}
    lost: dict[int, str] = {}
    for each in run.servers.attendance:
        if isinstance(each, Joined) or each.why == Why.DONE:
            lost.pop(each.worker, None)
        else:
            # Servers see a connection that ends; a launcher that started the workers saw how they ended.
            lost[each.worker] = run.failed.get(each.worker, each.why) if each.why == Why.ENDED else each.why
    return {**lost, **dict.fromkeys(run.servers.early, EARLY)}

"""What evenstep adds to an iteration, counted in calls, which do not depend on how fast the machine is."""

import numpy as np
import pytest
from harness import parts, real_compute
from harness.real_compute import Case
from harness.workers import run_workers

BUDGET = {"bsp": (58, 143), "lb-bsp": (75, 235)}
"""Calls beyond plain DDP's: of Python functions, and of C functions too. benchmarks/overhead.py says what they take."""


def test_the_timers_find_every_method_and_leave_no_trace():
    methods = [pair for each in parts.PARTS.values() for pair in each]
    before = [getattr(owner, name) for owner, name in methods]
    with parts.timed() as timers:
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(methods, before, strict=True))
    assert [getattr(owner, name) for owner, name in methods] == before
    assert not timers.seconds


@pytest.mark.multiprocess
@pytest.mark.alone  # Sizes that move cost calls, and on a busy machine they move.
def test_an_iteration_stays_within_its_budget_of_calls(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    case = Case(millions=0.1, few=True, batch=8)
    counts = run_workers(real_compute.WORKERS, real_compute.calls, (case, ("ddp", *BUDGET), 80))
    extra = {name: np.subtract(counts[name], counts["ddp"]) for name in BUDGET}
    assert all((extra[name] <= BUDGET[name]).all() for name in BUDGET), extra

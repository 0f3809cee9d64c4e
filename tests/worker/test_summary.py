"""What worker 0 prints at the end of a run: its words are those of the account; here is the picture below them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.made_meetings import meetings_of

from evenstep.core.samples import Share
from evenstep.core.values import Reports
from evenstep.report.account.account import Account
from evenstep.worker.iteration import Iteration
from evenstep.worker.summary import Summary, bars


def shown(monkeypatch, workers, *, encoding="utf-8", terminal=False):
    account = Account(workers, 12 * workers)
    compute = [0.010] * (workers - 1) + [0.040]
    account.take(meetings_of([[12] * workers] * 20, [compute] * 20, comm=0.010))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(encoding=encoding, isatty=lambda: terminal))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return bars(account, "lb-bsp")


def test_each_worker_has_a_bar_with_its_batch_size(monkeypatch):
    assert shown(monkeypatch, 2) == [
        "lb-bsp   average iteration 50 ms",
        "  worker 0   " + "█" * 8 + "░" * 24 + "·" * 8 + "  12 samples",
        "  worker 1   " + "█" * 32 + "·" * 8 + "  12 samples",
        "  ██ compute   ░░ waiting   ·· communication, input and the script",
    ]


def test_only_a_terminal_has_colours(monkeypatch):
    assert any("\x1b[34m" in line for line in shown(monkeypatch, 2, terminal=True))


@pytest.mark.parametrize("about", [{"workers": 1}, {"workers": 9}, {"workers": 4, "encoding": "ascii"}])
def test_there_are_none_for_one_worker_for_many_or_where_they_cannot_be_printed(about, monkeypatch):
    assert shown(monkeypatch, **about) == []


def met(number, script_seconds):
    """An iteration of 1 ms of two workers, before which worker 0 did something else for so long."""
    sizes = np.array([12, 12])
    share = Share(iteration=number, positions=tuple(range(12)), samples=12, sizes=sizes)
    done = Iteration(
        number=number,
        epoch=0,
        share=share,
        piece=share,
        batch_sizes=[12],
        samples=12,
        load=12,
        passes=1,
        entered=0.0,
        input_seconds=0.0,
        script_seconds=script_seconds,
        paused=0.001,
    )
    reports = Reports(sizes, np.array([1000, 1000]), np.zeros(2, dtype=np.int64), sizes)
    return done, reports, np.array([[round(1e6 * done.input_seconds), round(1e6 * done.script_seconds)], [0, 0]])


def test_all_waiting_is_less_than_all_time_though_worker_0_stands_still_for_most_of_it():
    # After an iteration that may not be in the sample that the account keeps.
    summary = Summary(workers=2, global_batch_size=24, scheme="bsp", say=lambda _: None)
    still = {number: 3.0 if number % 100 == 50 else 0.0 for number in range(2000)}
    for number, seconds in still.items():
        summary.take(*met(number, seconds))
    summary.drop()
    account = summary.account
    assert account.seconds == pytest.approx(2000 * 0.001 + sum(still.values()), rel=0.01)
    assert account.waiting == pytest.approx(0.5, abs=0.05)
    assert account.gain.equal_waits == pytest.approx(0.5, abs=0.05)

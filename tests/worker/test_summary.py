"""What worker 0 prints at the end of a run: its words are those of the account; here is the picture below them."""

import sys
from types import SimpleNamespace

import pytest
from support.made_meetings import meetings_of

from evenstep.report.account import Account
from evenstep.worker.summary import bars


def shown(monkeypatch, workers, *, encoding="utf-8", terminal=False, iterations=20):
    account = Account(workers, 12 * workers)
    compute = [0.010] * (workers - 1) + [0.040]
    if iterations:
        account.take(meetings_of([[12] * workers] * iterations, [compute] * iterations, comm=0.010))
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


def test_nor_for_a_run_without_an_iteration(monkeypatch):
    assert shown(monkeypatch, 2, iterations=0) == []

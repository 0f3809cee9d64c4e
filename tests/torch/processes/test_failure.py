"""One hook for exceptions that end the process, however often a script calls `prepare`."""

import gc
import sys
import weakref

import pytest
import torch
from support import training
from support.training import Run

from evenstep.torch.failure import when_failing
from evenstep.worker.tracker import Tracker


@pytest.fixture
def shown(monkeypatch):
    """What the hook of before is called with, in place of Python's own."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: errors.append(error))
    return errors


def fail(error):
    sys.excepthook(type(error), error, None)


def alive(kind):
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("scheme", ["lb-bsp", "bsp:micro_batch=5", "local-sgd"])
def test_preparing_often_leaves_one_hook_and_nothing_of_what_was_closed(shown, scheme):
    before = alive(Tracker)
    hooks = set()
    for _ in range(20):
        model, optimizer, loader = training.prepared(Run(samples=10, scheme=scheme))
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
        loader.close()
        hooks.add(sys.excepthook)
    del model, optimizer, loader
    assert len(hooks) == 1
    assert alive(Tracker) == before
    error = RuntimeError("after all of it")
    fail(error)
    assert shown == [error]


def test_a_run_that_is_no_longer_referred_to_does_not_hear_of_errors(shown, tmp_path):
    before = alive(Tracker)
    prepared = training.prepared(Run(samples=10, options={"run_dir": tmp_path}))
    tracker = weakref.ref(prepared[2].engine.tracker)
    del prepared
    gc.collect()
    assert tracker() is None
    assert alive(Tracker) == before
    fail(ValueError("of another's"))
    assert len(shown) == 1
    assert "of another's" not in (tmp_path / "worker-0.jsonl").read_text()


class Owner:
    """Stands for a run."""


def test_another_librarys_hook_on_top_is_called_once_for_each_error(shown):
    owner, heard, above = Owner(), [], []
    when_failing(owner, lambda _, error: heard.append(error) or error)
    below = sys.excepthook

    def on_top(kind, error, traceback):
        above.append(error)
        below(kind, error, traceback)

    sys.excepthook = on_top
    when_failing(owner, lambda _, error: heard.append(error) or torch.OutOfMemoryError("named"))
    error = ValueError("boom")
    fail(error)
    assert heard == [error]
    assert [str(each) for each in above] == ["named"]
    assert shown == above

"""What a worker writes down of its own beside its iterations."""

import sys
import warnings

import pytest
import torch
from msgspec.structs import replace
from support.records import check_records
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import parse_cluster
from evenstep.telemetry import read_events
from evenstep.telemetry.events import CheckpointDone, Disturbed, Ended, Failed, IterationDone, Noted
from evenstep.worker import iteration, tracker

SPELL = """
[disturbances.spell]
kind = "from"
factor = 2
first = 1
until = 5
[[workers]]
disturb = ["spell"]
"""


def prepared(run_dir, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=4)
    return evenstep.prepare(model, optimizer, loader, run_dir=run_dir, **options)


def train(model, optimizer, loader):
    for (batch,) in loader:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loader.note(loss=loss, count=3)


def of_kind(run_dir, kind):
    return [replace(event, at=0.0) for event in read_events(run_dir, kind=kind)]


def test_checkpoints_slowness_and_notes_are_written_down(tmp_path):
    run_dir = tmp_path / "run"
    for start in range(2):
        model, optimizer, loader = prepared(run_dir, emulate=parse_cluster(SPELL))
        assert evenstep.checkpoint.restore(tmp_path / "checkpoints", model, optimizer, loader) is None or start
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # A loss as it is can be noted.
            train(model, optimizer, loader)
        asynchronous = bool(start)
        saved = evenstep.checkpoint.save(tmp_path / "checkpoints", model, optimizer, loader, asynchronous=asynchronous)
        loader.close()
        if not start:
            first = saved.name
    assert of_kind(run_dir, CheckpointDone) == [
        CheckpointDone(worker=0, at=0.0, iteration=7, name=first, restored=False),
        CheckpointDone(worker=0, at=0.0, iteration=-1, name=first, restored=True),
        CheckpointDone(worker=0, at=0.0, iteration=7, name=saved.name, restored=False),
    ]
    told = [(event.iteration, event.factor) for event in of_kind(run_dir, Disturbed)]
    assert told == [(1, 2.0), (5, 1.0)] * 2
    assert len(of_kind(run_dir, Noted)) == 16
    assert len(of_kind(run_dir, Ended)) == 2
    assert {"run", "plan", "iteration"} <= check_records(run_dir)


def test_without_a_run_directory_no_event_of_an_iteration_is_made(monkeypatch):
    made = []
    for module, name in (
        *((tracker, each) for each in ("Planned", "Noted", "Disturbed")),
        (iteration, "IterationDone"),
    ):
        monkeypatch.setattr(module, name, lambda *, kind=name, **_: made.append(kind))
    model, optimizer, loader = prepared(None, emulate=parse_cluster(SPELL))
    train(model, optimizer, loader)
    loader.close()
    assert made == []


def test_waiting_for_the_other_workers_while_a_batch_is_fetched_is_not_waiting_for_input(tmp_path):
    now = [0.0]

    class Meeting(TensorDataset):
        def __getitem__(self, index):
            with loader.engine.meeting():
                now[0] += 100.0
            now[0] += 1.0
            return super().__getitem__(index)

    model, data = torch.nn.Linear(2, 1), DataLoader(Meeting(torch.ones(32, 2)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = evenstep.prepare(model, optimizer, data, run_dir=tmp_path)
    loader.engine.tracker.clock = lambda: now[0]
    train(model, optimizer, loader)
    loader.close()
    assert [event.input_seconds for event in read_events(tmp_path, kind=IterationDone)] == [4.0] * 8


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no good\nat all"), "no good"),
        (KeyboardInterrupt(), ""),
        (RuntimeError("x" * 1000), "x" * 297 + "..."),
    ],
)
def test_an_exception_that_ends_the_script_is_written_down_in_a_line(error, text, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    model, optimizer, loader = prepared(tmp_path)
    train(model, optimizer, loader)
    sys.excepthook(type(error), error, None)
    (event,) = of_kind(tmp_path, Failed)
    assert (event.type, event.text, event.iteration) == (type(error).__name__, text, 7)
    loader.close()
    # What comes after is no longer this run's.
    sys.excepthook(type(error), error, None)
    assert len(of_kind(tmp_path, Failed)) == 1
    assert shown == [error, error]

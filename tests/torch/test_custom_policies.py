"""A user's own policies in real runs: in-process as an object, and on servers by the name of their module."""

import json
import os
import sys
from pathlib import Path

import pytest
from support import own_policies
from support.processes import results, run_workers
from support.training import Run

import evenstep
from evenstep.cli.main import main

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def modules_are_found(monkeypatch):
    """As after `cd examples`; the servers find the tests' own module on the path that they are told."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))


def in_process(run):
    """On each worker, from one start: objects that decide well and others that do not, one of them in mid-run."""
    sys.path.append(str(EXAMPLES))
    from custom_policy import ByLastTime

    schemes = {
        "well": evenstep.policies.scheme_of(ByLastTime, keep=0.2),
        "uneven": evenstep.Scheme(load=own_policies.WrongLoad(wrong="sum", after=1000)),
        "sum": evenstep.Scheme(load=own_policies.WrongLoad(wrong="sum")),
        "type": own_policies.wrong_sizes(wrong="type"),
    }
    return own_policies.train_under(schemes, run), own_policies.fail_later(run, after=3)


def test_objects_in_one_process_each():
    run = Run(samples=80, batch_size=5, epochs=2)
    (first, later), (second, also_later) = results(run_workers(in_process, 2, run))
    assert first["well"] == second["well"]
    assert all(sum(sizes) == 10 for sizes in first["well"]["sizes"])
    # The union batch is the same whatever the sizes are.
    assert first["uneven"]["sizes"][0] == [8, 2]
    assert first["uneven"]["weights"] == pytest.approx(first["well"]["weights"], abs=1e-12)
    assert first["sum"] == second["sum"]
    assert "the load policy WrongPolicy gave the sizes [2, 2], which sum to 4 and not to the global b" in first["sum"]
    assert "allocate() of the load policy WrongPolicy gave ndarray: return an Allocation" in first["type"]
    # The iteration for which it decides wrongly never begins, so no weight changes by it.
    assert later == also_later
    assert later[0] == 3
    assert "the load policy WrongPolicy gave the sizes [2, 2]" in later[1]


def events(run_dir):
    return [json.loads(line) for file in Path(run_dir).glob("*.jsonl") for line in file.read_text().splitlines()]


def test_on_servers_by_the_module_on_the_command_line(tmp_path, capfd):
    scheme = "custom_policy:warm_up:iterations=4,bound=2,load=custom_policy:by_last_time"
    words = ["--workers", "2", "--slow", "1=3x", "--scheme", scheme, "--run-dir", str(tmp_path / "run")]
    assert main(["run", *words, "custom_policy.py", "--epochs", "1"]) == 0
    assert "epoch 0: " in capfd.readouterr().out
    written = events(tmp_path / "run")
    name = "custom_policy:warm-up:iterations=4,bound=2,load=custom_policy:by-last-time"
    assert {event["scheme"] for event in written if event["event"] == "run"} == {name}
    leads = [event["lead"] for event in written if "lead" in event]
    assert leads
    assert max(leads) <= 2


def test_a_wrong_decision_on_servers_ends_the_run_with_a_sentence(capfd):
    words = ["--workers", "2", "--scheme", "support.own_policies:wrong_sync:wrong=holds"]
    assert main(["run", *words, str(ROOT / "tests/cli/scripts/trains.py"), "12"]) != 0
    error = capfd.readouterr().err
    assert "on_push() of the sync policy WrongSyncPolicy " in error
    assert " trained " not in error

"""A run begins with the batch sizes that an earlier start on the same workers ended with."""

import json
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parent / "scripts" / "begins.py"
BALANCED = [18, 6]


def run(*words, workers=2):
    return main(["run", "--workers", str(workers), *map(str, words)])


def sizes_of(folder, life=0, worker=0):
    return [json.loads(line) for line in (folder / f"life-{life}-worker-{worker}.jsonl").read_text().splitlines()]


def plans_of(run_dir):
    events = (event for event in read_events(run_dir) if event.kind == "plan")
    return [(event.iteration, event.basis, event.batch_sizes) for event in events]


def test_the_next_start_begins_with_the_last_sizes(tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert run("--run-dir", run_dir, SCRIPT, tmp_path) == 0
    assert run("--run-dir", tmp_path / "next", "--start-from", run_dir, SCRIPT, tmp_path) == 0
    before, after = plans_of(run_dir), plans_of(tmp_path / "next")
    assert before[0] == (0, "start", [12, 12])
    assert before[-1][2] == BALANCED
    assert after[0] == (0, "speed", BALANCED)
    # The other worker has begun with the same sizes, and other workers begin with equal ones and a sentence.
    assert sizes_of(tmp_path, worker=1)[20] == BALANCED
    capfd.readouterr()
    (tmp_path / "three").mkdir()
    assert run("--start-from", run_dir, SCRIPT, tmp_path / "three", workers=3) == 0
    assert sizes_of(tmp_path / "three")[0] == [8, 8, 8]
    said = f"sizes do not begin as the run in {run_dir} left them: it had 2 workers and now there are 3"
    assert capfd.readouterr().err.count(said) == 1


def test_a_restart_begins_with_the_sizes_that_the_run_had(tmp_path):
    assert run("--max-restarts", 1, SCRIPT, tmp_path, "dies") == 0
    before = sizes_of(tmp_path)
    assert before[0] == [12, 12]
    assert before[-1] == BALANCED
    assert sizes_of(tmp_path, life=1)[0] == BALANCED
    assert sizes_of(tmp_path, life=1, worker=1)[0] == BALANCED


def test_a_checkpoint_begins_with_the_sizes_that_it_holds(tmp_path):
    for _ in range(2):
        assert run(SCRIPT, tmp_path, "stops") == 0
    sizes = sizes_of(tmp_path)
    assert len(sizes) == 15 + 5  # The rest of the epoch.
    assert sizes[14] == sizes[15] == BALANCED


def test_a_run_that_is_not_there_is_refused_before_a_worker_starts(tmp_path, capfd):
    assert run("--start-from", tmp_path / "none", SCRIPT, tmp_path) == 2
    assert "there is no folder" in capfd.readouterr().err
    assert not list(tmp_path.glob("life-*"))

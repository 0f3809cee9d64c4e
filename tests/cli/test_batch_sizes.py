"""Fixed sizes for a script that says nothing of them: `evenstep run --batch-sizes`."""

import socket
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "trains.py"


def run(*words):
    return main(["run", "--workers", "2", *map(str, words)])


def test_fixed_sizes_by_rank_and_host_reach_the_workers_of_an_unchanged_script(tmp_path, capfd):
    sizes = f"rank:0=14,host:{socket.gethostname()}=6"
    assert run("--batch-sizes", sizes, "--run-dir", tmp_path / "run", SCRIPT, 12) == 0
    events = list(read_events(tmp_path / "run"))
    assert {event.scheme for event in events if event.kind == "run"} == {"static:14/6"}
    assert [event.batch_sizes for event in events if event.kind == "plan"] == [[14, 6]]
    assert capfd.readouterr().err.startswith("evenstep: static:14/6 trained ")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (["14,6,4"], "--batch-sizes: there are sizes for 3 workers, and the run has 2: give one for each"),
        (
            ["14,six"],
            "--batch-sizes: the batch size of worker 1 must be a whole number from 1 to 2147483647, not 'six'",
        ),
        (
            ["rank:0=14,node:b=6"],
            "--batch-sizes: a batch size cannot be that of 'node:b': write rank:NUMBER, host:NAME",
        ),
        (
            ["14,6", "--scheme", "asp"],
            "--batch-sizes fixes the sizes and --scheme 'asp' would set them: give one of them",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_a_worker_starts(sizes, says, tmp_path, capfd):
    assert run("--batch-sizes", *sizes, SCRIPTS / "tells.py", tmp_path) == 2
    assert capfd.readouterr().err.startswith(f"evenstep: {says}")
    assert not list(tmp_path.iterdir())


def test_sizes_for_workers_of_two_processes_are_left_to_the_workers_who_have_one_each(capfd):
    assert run("--batch-sizes", "20", SCRIPT, 12) == 1
    assert "there are sizes for 1 workers, and the run has 2: give one for each" in capfd.readouterr().err


def test_what_a_summary_calls_the_scheme_can_be_typed(tmp_path, capfd):
    scheme, name = "ssp:load=static:rank:0=14/rank:1=6", "ssp:load=static:14/6"
    assert run("--scheme", scheme, "--run-dir", tmp_path / "run", SCRIPT, 12) == 0
    assert capfd.readouterr().err.startswith(f"evenstep: {name} trained ")
    assert {event.scheme for event in read_events(tmp_path / "run") if event.kind == "run"} == {name}

"""The event log: its records, and what follows it."""

import json
import resource
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS
from support.records import check_records

from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import SCHEMA, JsonlRecorder, RunTail, read_events
from evenstep.telemetry.events import (
    RECORDS,
    Disturbed,
    Ended,
    Failed,
    IterationDone,
    Run,
)
from evenstep.telemetry.reading import event_of
from evenstep.telemetry.recorder import line_of

pytestmark = pytest.mark.xdist_group("events")

CLUSTER = """
[devices.d]
per_sample = "1 ms"
[disturbances.spell]
kind = "from"
factor = 3
first = 4
until = 12
[[workers]]
device = "d"
count = 2
[[workers]]
device = "d"
disturb = ["spell"]
"""


@pytest.fixture(scope="module", params=["lb-bsp", "ssp"])
def run_dir(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    scenario = Scenario(
        cluster=parse_cluster(CLUSTER), scheme=parse_scheme(request.param), global_batch_size=30, iterations=20,
        epoch_samples=300, message_bytes=0,
    )  # fmt: skip
    log = Log(
        workers=[JsonlRecorder(folder, worker) for worker in range(3)], server=JsonlRecorder(folder, 0, role="server")
    )
    simulate(scenario, log=log)
    log.close()
    return folder


def test_every_line_of_a_run_is_a_record_with_nothing_left_over(run_dir):
    seen = check_records(run_dir)
    assert {"run", "plan", "disturbance", "iteration", "end"} <= seen
    assert ("begin" in seen) == (next(read_events(run_dir)).engine == "server")


def test_records_are_frozen(run_dir):
    record = next(read_events(run_dir))
    assert isinstance(record, Run)
    assert record.schema == SCHEMA
    with pytest.raises(AttributeError):
        record.seed = 3


def read(line):
    return event_of(json.dumps(line).encode())


def test_fields_with_a_default_may_be_missing_and_unknown_ones_are_skipped():
    line = {
        "event": "iteration", "worker": 0, "iteration": 3, "at": 7.0, "samples": 8, "iteration_seconds": 0.1,
        "input_seconds": 0.0, "compute_seconds": 0.1, "wait_seconds": 0.0, "comm_seconds": 0.0, "unheard_of": 1,
    }  # fmt: skip
    assert read(line) == IterationDone(
        worker=0, iteration=3, samples=8, iteration_seconds=0.1, input_seconds=0.0, compute_seconds=0.1,
        wait_seconds=0.0, comm_seconds=0.0, epoch=0, basis="speed", at=7.0,
    )  # fmt: skip
    assert read({"event": "of another day", "samples": "many"}) is None


@pytest.mark.parametrize("ascii_only", [True, False])
def test_texts_command_no_terminal(ascii_only):
    text = "\x1b]0;a\x07\\u001b\x9b2J\x7f\b\r\u00e9\t\n"
    line = {"event": "error", "worker": 0, "iteration": 0, "at": 1, "type": "A", "text": text}
    read = event_of(json.dumps(line, ensure_ascii=ascii_only).encode()).text
    assert all(each.isprintable() or each in "\t\n" for each in read)
    assert read.startswith(r"\u001b]0;a\u0007\u001b")
    assert read.endswith("\u00e9\t\n")


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ({"event": "plan", "worker": 0, "iteration": 0}, "has no 'batch_sizes': it was written by another version"),
        (
            {
                "event": "run", "worker": 0, "scheme": "bsp", "global_batch_size": 1, "iterations_per_epoch": 1,
                "schema": SCHEMA + 1,
            },
            "use a newer one",
        ),
        ({"event": "end", "worker": 0, "at": "x"}, "is not an event .*: delete it or fix it"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_one_sentence(line, fragment, tmp_path):
    (tmp_path / "worker-0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=rf"worker-0\.jsonl line 1 .*{fragment}"):
        list(read_events(tmp_path))


def test_each_kind_has_one_record():
    assert len(RECORDS) == 29
    assert all(record.__struct_config__.tag == kind for kind, record in RECORDS.items())


def test_a_text_that_is_no_unicode_is_recorded_as_far_as_it_goes(tmp_path):
    recorder = JsonlRecorder(tmp_path, 0)
    recorder.record(Failed(worker=0, iteration=1, at=1.0, type="OSError", text="no \udcff"))
    recorder.close()
    assert [event.text for event in read_events(tmp_path)] == ["no ?"]


def end(at):
    return Ended(worker=0, at=at)


def test_a_line_that_is_not_whole_waits_for_the_next_look(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    tail = RunTail(tmp_path)
    assert list(tail.new()) == []
    path.write_text('{"event":"end","worker":0,"at":1}\n{"event":"end","wor')
    assert list(tail.new()) == [end(1)]
    with path.open("a") as file:
        file.write('ker":0,"at":2}\n<damaged>\n{"event":"end","worker":0,"at":3}\n')
    assert list(tail.new()) == [end(2), end(3)]


def test_files_that_come_later_are_followed_too(tmp_path):
    tail = RunTail(tmp_path)
    assert list(tail.new()) == []
    for number, name in enumerate(("worker-10", "server-0", "launcher")):
        (tmp_path / f"{name}.jsonl").write_bytes(line_of(end(number)))
        assert list(tail.new()) == [end(number)]


def test_slowness_is_told_when_it_begins_and_when_it_ends(run_dir):
    told = list(read_events(run_dir, kind=Disturbed))
    assert [(each.worker, each.iteration, each.factor) for each in told] == [(2, 4, 3.0), (2, 12, 1.0)]
    iterations = {each.iteration: each for each in read_events(run_dir, kind=IterationDone) if each.worker == 2}
    for each in told:
        assert each.at == pytest.approx(iterations[each.iteration].at)


ENDS = """
import os, sys, threading, time
from pathlib import Path
from evenstep.telemetry import JsonlRecorder
from evenstep.telemetry.events import Ended, Planned

def run(name):
    last = lambda: Ended(worker=0, at=time.perf_counter())
    recorder = JsonlRecorder(Path(sys.argv[1], name), 0, last=last)
    recorder.record(Planned(worker=0, batch_sizes=[1]))
    if os.fork() == 0:
        sys.exit()  # Its end is nobody's.
    os.wait()
    if name == "closes":
        recorder.close()
        recorder.close()
    if name == "is killed":
        os.kill(os.getpid(), 9)
    if name == "raises":
        raise ValueError(recorder)
    sys.exit(len(name))

for name in ("closes", "is killed", "raises", "exits"):
    if os.fork() == 0:
        run(name)
    os.wait()
"""


def test_who_ends_by_itself_says_so_once(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, tmp_path], stderr=subprocess.DEVNULL, timeout=GUARD_SECONDS, check=True)
    kinds = {folder.name: [event.kind for event in read_events(folder)] for folder in tmp_path.iterdir()}
    ended = ["plan", "end"]
    assert kinds == {"closes": ended, "is killed": ["plan"], "raises": ended, "exits": ended}


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path):
    recorder = JsonlRecorder(tmp_path, 0)
    recorder.record(end(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # Writing beyond it is an OSError too.
    try:
        with pytest.warns(UserWarning, match="cannot be written any more .*, so the run goes on without a record"):
            recorder.record(Failed(worker=0, iteration=1, at=1.0, type="", text="b" * 200))
        recorder.record(end(2))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(read_events(tmp_path)) == [end(1)]

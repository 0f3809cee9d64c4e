"""The event log: its records, and what follows it."""

import json

import pytest

from evenstep.core.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import SCHEMA, JsonlRecorder, Logged, RunTail, Silent, Tail, read_events
from evenstep.telemetry.events import RECORDS, IterationDone, Run, parse_event

CLUSTER = """
[devices.d]
per_sample = "1 ms"
[[workers]]
device = "d"
count = 3
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
    seen = set()
    for role in ("worker", "server"):
        for line in read_events(run_dir, role=role):
            record = parse_event(line)
            if record is None:
                assert line["event"] in ("begin", "rest", "stop")
                continue
            seen.add(record.kind)
            fields = {*type(record).__slots__, "event", "worker", "server"}
            assert set(line) <= fields
            assert all(getattr(record, name) == line[name] for name in line if name in type(record).__slots__)
    assert {"run", "plan", "iteration"} <= seen


def test_records_are_frozen(run_dir):
    record = parse_event(next(read_events(run_dir)))
    assert isinstance(record, Run)
    assert record.schema == SCHEMA
    with pytest.raises(AttributeError):
        record.seed = 3


def test_what_version_1_wrote_is_understood():
    line = {
        "event": "iteration", "worker": 0, "iteration": 3, "samples": 8, "iteration_seconds": 0.1,
        "input_seconds": 0.0, "compute_seconds": 0.1, "wait_seconds": 0.0, "comm_seconds": 0.0, "unheard_of": 1,
    }  # fmt: skip
    assert parse_event(line) == IterationDone(
        iteration=3, samples=8, iteration_seconds=0.1, input_seconds=0.0, compute_seconds=0.1, wait_seconds=0.0,
        comm_seconds=0.0,
    )  # fmt: skip
    assert parse_event({"event": "of another day"}) is None


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ({"event": "plan", "iteration": 0}, "has no 'batch_sizes'"),
        (
            {"event": "run", "scheme": "bsp", "global_batch_size": 1, "iterations_per_epoch": 1, "schema": SCHEMA + 1},
            "use a newer one",
        ),
    ],
)
def test_what_cannot_be_understood_is_one_sentence(line, fragment):
    with pytest.raises(ConfigError, match=fragment):
        parse_event(line)


def test_each_kind_has_one_record():
    assert all(record.kind == kind for kind, record in RECORDS.items())


def test_a_line_that_is_not_whole_waits_for_the_next_look(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_text('{"event":"a"}\n{"eve')
    assert list(tail.new()) == [{"event": "a"}]
    with path.open("a") as file:
        file.write('nt":"b"}\n<damaged>\n{"event":"c"}\n')
    assert list(tail.new()) == [{"event": "b"}, {"event": "c"}]


def test_files_that_come_later_are_followed_too(tmp_path):
    tail = RunTail(tmp_path)
    assert list(tail.new()) == []
    for name, role in (("worker-10", "worker"), ("server-0", "server"), ("launcher", "launcher")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"event": name}) + "\n")
        assert list(tail.new()) == [(role, {"event": name})]


def test_what_matters_is_logged_with_the_rank_named(caplog):
    logged = Logged(Silent(), 3)
    with caplog.at_level("DEBUG", logger="evenstep"):
        logged.record({"event": "run", "scheme": "lb-bsp", "workers": 4, "global_batch_size": 64})
        logged.record({"event": "iteration"})
        logged.record({"event": "plan", "iteration": 2, "batch_sizes": [16, 16, 16, 16]})
        logged.record({"event": "diverging", "iteration": 9, "since": 5})
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", "worker 3: lb-bsp with 4 workers, global batch 64"),
        ("DEBUG", "worker 3: sizes from iteration 2: [16, 16, 16, 16]"),
        ("WARNING", "worker 3: training seems to be diverging since iteration 5"),
    ]

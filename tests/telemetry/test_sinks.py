"""Other people's tools read what we write for them."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from msgspec import structs
from support.guard import GUARD_SECONDS
from support.made_log import events_of, write_log
from support.records import records

from evenstep.cli.main import main
from evenstep.telemetry.events import Failed, IterationDone, Noted
from evenstep.telemetry.sinks.prometheus import Prometheus

PARTS = ((0.001, 0.020, 0.001), (0.001, 0.080, 0.001))


def test_a_trace_has_each_part_of_each_iteration_at_its_time(tmp_path):
    trace = tmp_path / "trace.json"
    assert main(["export", str(write_log(tmp_path / "run", PARTS, notes=True)), "--trace", str(trace)]) == 0
    entries = json.loads(trace.read_text())
    rows = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert rows == {1: "worker 0", 2: "worker 1"}
    compute = [entry for entry in entries if entry["name"] == "compute" and entry["tid"] == 2]
    assert [entry["dur"] for entry in compute] == pytest.approx([80_000] * 12)
    assert compute[1]["ts"] - compute[0]["ts"] == pytest.approx(87_000)
    whole = [entry for entry in entries if entry["name"].startswith("iteration ") and entry["tid"] == 2]
    assert whole[0]["ts"] + 1000 == pytest.approx(compute[0]["ts"])
    assert sum(entry["ph"] == "C" for entry in entries) == 24


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in tensorboard's own imports
def test_tensorboard_reads_what_was_written_for_it(tmp_path):
    logs = tmp_path / "logs"
    assert main(["export", str(write_log(tmp_path / "run", PARTS, notes=True)), "--tensorboard", str(logs)]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(logs / "worker-1")).Reload()
    speeds = read.Scalars("speed_samples_per_second")
    assert [each.step for each in speeds] == list(range(12))
    assert [each.value for each in speeds] == pytest.approx([10 / 0.080] * 12)
    assert read.Scalars("noted/loss")[-1].value == pytest.approx(1 / 12)
    assert speeds[0].wall_time == pytest.approx(5000.087)


def test_prometheus_is_served_on_this_host_alone():
    sink = Prometheus("127.0.0.1", 0)
    try:
        for event in records(events_of(PARTS, notes=True)):
            sink.record(event)
        with urllib.request.urlopen(sink.url, timeout=GUARD_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close()
    assert 'evenstep_iterations_total{worker="1"} 12.0' in lines
    assert 'evenstep_samples_total{worker="0"} 120.0' in lines
    assert 'evenstep_compute_seconds{worker="1"} 0.08' in lines
    assert any(line.startswith('evenstep_noted_loss{worker="0"} 0.08') for line in lines)


def test_the_dashboard_asks_for_metrics_that_are_served():
    dashboard = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"evenstep_\w+", target["expr"])
    }
    sink = Prometheus("127.0.0.1", 0)
    try:
        for event in records(events_of(PARTS)):
            sink.record(event)
            if isinstance(event, IterationDone):
                sink.record(structs.replace(event, staleness=1, behind=1, lead=0))
        with urllib.request.urlopen(sink.url, timeout=GUARD_SECONDS) as answer:
            served = {line.partition("{")[0].partition(" ")[0] for line in answer.read().decode().splitlines()}
    finally:
        sink.close()
    assert len(asked) > 10
    assert asked <= served


def test_what_was_noted_under_any_name_has_a_metric():
    sink = Prometheus("127.0.0.1", 0)
    try:
        for values in ({"loss/train [\xe4]": 0.5}, {"loss_train ____": None}, {"loss-train": 2}):
            sink.record(Noted(worker=0, iteration=1, at=1.0, samples=4, values=values))
        sink.record(Failed(worker=0, iteration=1, at=1.0, type="ValueError", text=""))
        with urllib.request.urlopen(sink.url, timeout=GUARD_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close()
    assert 'evenstep_noted_loss_train____{worker="0"} 0.5' in lines
    assert 'evenstep_noted_loss_train{worker="0"} 2.0' in lines
    assert "evenstep_workers_failed_total 1.0" in lines


def test_what_happens_at_a_time_is_in_the_trace(tmp_path):
    run_dir, trace = write_log(tmp_path / "run", PARTS), tmp_path / "trace.json"
    with (run_dir / "worker-1.jsonl").open("a") as file:
        error = {"worker": 1, "event": "error", "iteration": 3, "at": 100.5, "type": "ValueError", "text": "no good"}
        file.write(json.dumps(error) + "\n")
    assert main(["export", str(run_dir), "--trace", str(trace)]) == 0
    (entry,) = [entry for entry in json.loads(trace.read_text()) if entry["ph"] == "i"]
    assert (entry["name"], entry["tid"], entry["args"]["text"]) == ("error", 2, "no good")


@pytest.mark.multiprocess
def test_export_follows_a_run_until_it_is_interrupted(tmp_path):
    run_dir = write_log(tmp_path / "run", PARTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "evenstep.cli.main", "export", str(run_dir), "--prometheus", "0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    address = process.stderr.readline().split()[3].rstrip(",")
    assert address.startswith("http://127.0.0.1:")
    text = ""
    while 'evenstep_iterations_total{worker="1"} 12.0' not in text:
        with urllib.request.urlopen(address, timeout=GUARD_SECONDS) as answer:
            text = answer.read().decode()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=GUARD_SECONDS)
    assert process.returncode == 0
    assert "events were exported" in errors


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("", "export where to?"),
        ("--prometheus everywhere", "takes a port, or HOST:PORT, not 'everywhere'"),
        ("--trace none/trace.json", "the trace none/trace.json cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(arguments, fragment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_log(tmp_path, PARTS))
    assert main(["export", ".", *arguments.split()]) == 2
    assert fragment in capsys.readouterr().err


def test_an_export_of_nothing_is_an_error_and_writes_nothing(tmp_path, capsys):
    for content in (None, "", "<damaged>\n"):
        if content is not None:
            (tmp_path / "worker-0.jsonl").write_text(content)
        assert main(["export", str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 2
        assert f"{tmp_path} holds no events: give the --run-dir of a run" in capsys.readouterr().err
        assert not (tmp_path / "trace.json").exists()

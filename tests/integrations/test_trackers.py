"""Experiment trackers read what was exported for them."""

import gzip
import http.server
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from support.made_log import write_log

from evenstep.cli.main import main

PARTS = ((0.001, 0.020, 0.001), (0.001, 0.080, 0.001))


@pytest.fixture
def run_dir(tmp_path):
    return write_log(tmp_path / "run", PARTS, notes=True)


def logged(path):
    """The records of wandb's file: after a header, the blocks of 32 KiB of LevelDB's log format."""
    data, at, part = path.read_bytes(), 7, b""
    while at < len(data):
        if at % 32768 > 32768 - 7:  # No room for another header: the rest of the block is padding.
            at += -at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield part
            part = b""


def test_wandb_has_the_metrics_of_each_worker(run_dir, tmp_path):
    pytest.importorskip("wandb", reason="needs pip install 'evenstep[wandb]'")
    settings = {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "DATA_DIR": str(tmp_path)}
    settings |= {"X_SERVICE_WAIT": "300", "INIT_TIMEOUT": "300"}  # Of a busy machine.
    environment = {**os.environ, **{f"WANDB_{name}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "evenstep.cli.main", "export", str(run_dir), "--wandb", "a-project"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in logged(path)]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    slow = [row for row in rows if "worker-1/compute_seconds" in row]
    assert [row["worker-1/iteration"] for row in slow] == list(range(12))
    assert [row["worker-1/compute_seconds"] for row in slow] == pytest.approx([0.08] * 12)
    assert any("worker-0/noted/loss" in row for row in rows)


@pytest.mark.filterwarnings("ignore")  # in mlflow's own imports
def test_mlflow_has_the_metrics_of_each_worker(run_dir, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs pip install 'evenstep[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for _ in range(2):  # The experiment is known by then.
        assert main(["export", str(run_dir), "--mlflow", "an experiment"]) == 0
    from mlflow import MlflowClient

    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("an experiment").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    points = client.get_metric_history(runs[0].info.run_id, "worker-1/compute_seconds")
    assert sorted(point.step for point in points) == list(range(12))
    assert [point.value for point in points] == pytest.approx([0.08] * 12)
    assert min(point.timestamp for point in points) == 5_000_087
    assert "worker-0/noted/loss" in runs[0].data.metrics


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what an exporter sends."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        packed = self.headers.get("Content-Encoding") == "gzip"
        self.server.got.append((self.path, gzip.decompress(body) if packed else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.mark.filterwarnings("ignore")  # in the exporter's own imports
def test_a_collector_of_opentelemetry_gets_gauges_and_counters(run_dir):
    pytest.importorskip("opentelemetry.exporter", reason="needs pip install 'evenstep[opentelemetry]'")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert main(["export", str(run_dir), "--opentelemetry", url]) == 0
        finally:
            server.shutdown()
            thread.join()
    path, body = server.got[-1]
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["evenstep.run"] == "run"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    compute = {
        point.attributes[0].value.string_value: point for point in metrics["evenstep.compute_seconds"].gauge.data_points
    }
    assert compute["1"].as_double == pytest.approx(0.08)
    assert {point.as_int for point in metrics["evenstep.samples"].sum.data_points} == {120}
    assert "evenstep.noted.loss" in metrics


def test_trackio_has_the_metrics_of_each_worker(run_dir, tmp_path):
    pytest.importorskip("trackio", reason="needs pip install 'evenstep[trackio]'")
    command = [sys.executable, "-m", "evenstep.cli.main", "export", str(run_dir), "--trackio", "a-project"]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    with closing(sqlite3.connect(tmp_path / "kept/a-project.db")) as kept:
        rows = [(step, json.loads(values)) for step, values in kept.execute("select step, metrics from metrics")]
    slow = {step: row["worker-1/compute_seconds"] for step, row in rows if "worker-1/compute_seconds" in row}
    assert slow == pytest.approx(dict.fromkeys(range(12), 0.08))
    assert any("worker-0/noted/loss" in row for _, row in rows)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "opentelemetry"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name, run_dir, monkeypatch, capsys):
    for module in ("wandb", "mlflow", "trackio", "opentelemetry.sdk.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["export", str(run_dir), f"--{name}", "x"]) == 2
    assert f"pip install 'evenstep[{name}]'" in capsys.readouterr().err

"""Collectors, and trackers by the points of curves, get what was exported."""

import gzip
import http.server
import sys
import threading

import pytest
from support.made_log import write_log

from evenstep.cli.main import main
from evenstep.telemetry import read_events
from evenstep.telemetry.sinks import Points

PARTS = ((0.001, 0.020, 0.001), (0.001, 0.080, 0.001))


@pytest.fixture
def run_dir(tmp_path):
    return write_log(tmp_path / "run", PARTS, notes=True)


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
class Refusing(Collector):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()


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


def test_a_collector_that_does_not_take_the_metrics_is_an_error(run_dir, capsys):
    pytest.importorskip("opentelemetry.exporter", reason="needs pip install 'evenstep[opentelemetry]'")
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["export", str(run_dir), "--opentelemetry", f"http://127.0.0.1:{server.server_port}"]) == 2
        finally:
            server.shutdown()
            thread.join()
    said = capsys.readouterr().err
    assert "took the metrics: start one, or give its address" in said
    assert "were exported" not in said


def test_a_collector_without_its_package_is_named_with_its_extra(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    assert main(["export", str(run_dir), "--opentelemetry", "x"]) == 2
    assert "pip install opentelemetry-exporter-otlp-proto-http" in capsys.readouterr().err


def test_the_points_of_a_run_are_the_curves_of_its_workers(run_dir):
    points = Points()
    found = [point for event in read_events(run_dir) if (point := points.of(event)) is not None]
    slow = [each for each in found if each.worker == 1 and "compute_seconds" in each.values]
    assert [each.iteration for each in slow] == list(range(12))
    assert [each.values["compute_seconds"] for each in slow] == pytest.approx([0.08] * 12)
    assert any("noted/loss" in each.values for each in found)

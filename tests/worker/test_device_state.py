"""The record stays as it is where NVML or the GPU is missing; the states that it has are in the report."""

import json

from support.made_log import write_log

from evenstep.cli.main import main
from evenstep.telemetry import Silent
from evenstep.worker.device_state import WithDevice


def test_without_a_gpu_that_nvml_knows_the_recorder_is_used_as_it_is():
    recorder = Silent()
    for device in ("cpu", "GPU-00000000-0000-0000-0000-000000000000"):
        assert WithDevice.of(recorder, device, lambda: 0.0) is recorder


def test_the_report_has_the_state_of_each_gpu(tmp_path):
    write_log(tmp_path, [(0.001, 0.020, 0.001)] * 2)
    with (tmp_path / "worker-1.jsonl").open("a") as file:
        for busy, used, celsius in ((0.5, 10**9, 70), (1.0, 3 * 10**9, 81)):
            state = {"at": 101.0, "utilisation": busy, "memory_bytes": used, "celsius": celsius}
            file.write(json.dumps({"event": "device", "worker": 1, **state}) + "\n")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    for heading, value in {"GPU busy": "75%", "most GPU memory": "3.0 GB", "hottest": "81 °C"}.items():
        assert f">{heading}</th>" in html
        assert f"<td>{value}</td>" in html

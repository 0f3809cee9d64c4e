"""`evenstep doctor` with real processes: what it says of hosts, speeds and gains, and what it refuses."""

import json
from datetime import timedelta

import pytest
from support.started import Started, evenstep
from torch.distributed import TCPStore

from evenstep.cli.main import main

CLUSTER = """
[devices.new]
per_sample = "1 ms"
[devices.old]
per_sample = "4 ms"
[[workers]]
device = "new"
count = 2
[[workers]]
device = "old"
"""
SHORT = ("--seconds", "0.1")


@pytest.mark.multiprocess
def test_a_slow_worker_is_found_and_the_gain_told_without_the_secret(tmp_path, monkeypatch, capfd):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    monkeypatch.setenv("EVENSTEP_SECRET", "0123456789abcdef" * 4)
    assert main(["doctor", "--workers", "3", "--emulate", str(cluster), *SHORT, "--json"]) == 0
    said = capfd.readouterr()
    assert "0123456789abcdef" not in said.out + said.err
    told = json.loads(said.out.splitlines()[-1])
    (host,) = told["hosts"]
    assert (host["workers"], host["devices"], host["secret"]) == ([0, 1, 2], ["cpu"] * 3, True)
    assert "gloo" in host["found"]["backends"]
    assert told["iterations"] >= 49
    assert told["samples_per_second"][0] > 2 * told["samples_per_second"][2]
    assert told["advice"]["pick"] == "lb-bsp"
    assert told["advice"]["why"][0].startswith("Worker 2 is a steady")


@pytest.mark.multiprocess
def test_one_worker_has_a_speed_and_no_gain(capfd):
    assert main(["doctor", *SHORT, "--batch-size", "8"]) == 0
    said = capfd.readouterr().out
    assert "One worker waits for no other: give --workers to compare several." in said
    assert "EVENSTEP_SECRET is not set" in said
    assert "interfaces" in said


@pytest.mark.multiprocess
def test_of_two_nodes_the_one_with_worker_0_prints_the_answer_of_both(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER.replace("count = 2\n", ""))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    words = ["doctor", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}"]
    words += ["--rdzv-conf", "is_host=false", "--local-addr", "localhost", "--emulate", cluster, *SHORT]
    first, second = (Started(evenstep, *words) for _ in range(2))
    with first, second:
        outputs = [first.communicate(), second.communicate()]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    (answer,) = [out for out, _ in outputs if out]
    assert "(node 0)" in answer
    assert "(node 1)" in answer
    assert "Use lb-bsp: +" in answer
    assert sum("worker 0 is on another host" in error for _, error in outputs) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train.py"], "takes no script, and train.py would be one"),
        (["--scheme", "bsp"], "has no --scheme"),
        (["--run-dir", "runs/a"], "has no --run-dir"),
        (["--resume", "runs/a"], "has no --resume"),
        (["--find-batch"], "has no --find-batch"),
        (["--largest", "64"], "has no --largest"),
        (["--seconds", "0"], "--seconds must be a positive number"),
        (["--seconds", "nan"], "--seconds must be a positive number"),
        (["--batch-size", "1"], "--batch-size must be at least 2"),
        (["--workers", "no"], "--workers must be a number"),
    ],
)
def test_what_is_not_for_it_is_refused(arguments, told, capsys):
    assert main(["doctor", *arguments]) == 2
    assert told in capsys.readouterr().err

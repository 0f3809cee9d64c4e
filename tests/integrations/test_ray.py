"""Ray Train on a local Ray: the mathematics of one process, servers as actors, and workers that are killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="needs pip install 'evenstep[ray]'")

from support import ray_runs

# Ray starts dozens of processes for every run, one after the other. All tests look at the same runs: one group.
pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # It is 2 s, at the end of each part of a run.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",  # It is 30 s, in which a killed worker's partner waits for it.
        "RAY_worker_niceness": "0",  # It is 15, and other tests would take all the time.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, ray_runs.__file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "folder": folder}


def test_a_config_without_a_scheme_takes_the_one_in_the_environment(monkeypatch):
    monkeypatch.setenv("EVENSTEP_SCHEME", "ssp:bound=3")
    assert ray_runs.EvenstepConfig().environment["EVENSTEP_SCHEME"] == "ssp:bound=3"
    assert ray_runs.EvenstepConfig(scheme="dbs").environment["EVENSTEP_SCHEME"] == "dbs"
    monkeypatch.delenv("EVENSTEP_SCHEME")
    assert "EVENSTEP_SCHEME" not in ray_runs.EvenstepConfig().environment


def alone():
    """The weights after one process has trained on the global batches."""
    model, data = ray_runs.task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(ray_runs.EPOCHS):
        for inputs, targets in torch.utils.data.DataLoader(data, batch_size=2 * ray_runs.BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_what_ray_has_divided_already_is_refused(runs):
    for said in runs["barrier"]["said"]:
        rows, prepared = said["refused"]
        assert "DataLoader" in rows
        assert "_WrappedDataLoader has its own __iter__" in prepared


def test_uneven_workers_end_with_the_weights_of_one_process_after_one_was_killed(runs):
    run = runs["barrier"]
    assert run["fired"]
    assert run["error"] is None
    assert len(run["said"]) == 2
    for said in run["said"]:
        np.testing.assert_allclose(said["weights"], alone(), rtol=0, atol=1e-10)
        assert said["sizes"] != [ray_runs.BATCH] * 2
    assert any(" scripted trained " in line for line in runs["summaries"]), runs["summaries"]


def test_servers_go_on_where_they_were_when_ray_starts_a_killed_worker_again(runs):
    run = runs["servers"]
    assert run["fired"]
    assert run["error"] is None
    first, second = run["said"]
    assert first["weights"] == second["weights"]
    assert any(" ssp:bound=1 trained " in line for line in runs["summaries"]), runs["summaries"]
    record = Path(runs["folder"], "servers", "run", "server-0.jsonl").read_text(encoding="utf-8")
    assert '"restored"' in record

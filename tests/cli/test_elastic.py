"""`evenstep run --elastic`: replicas that die are named and started again, and the others go on."""

import re
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS

from evenstep.cli import run, top
from evenstep.core.errors import ConfigError
from evenstep.report.summary import summarise

SCRIPT = """
import os, pathlib, signal, sys, time
import support.lean_torch, torch
import evenstep

torch.manual_seed(0)
inputs = torch.randn(4000, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
pathlib.Path("here-" + os.environ["RANK"]).touch()
while len(list(pathlib.Path().glob("here-*"))) < 2:  # Or one is killed alone, and nobody has its state.
    time.sleep(0.01)
steps = 0
for epoch in range(loader.epoch, 1):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        first = os.environ["RANK"] == "0" and os.environ["EVENSTEP_RESTART"] == "0"
        if first and steps >= 20 and len(loader.batch_sizes) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        steps += 1
sys.stdout.write(f"finished {os.environ['RANK']} {loader.session.step}\\n")
"""


@pytest.mark.multiprocess
def test_a_replica_that_is_killed_is_named_and_shown_and_the_run_goes_on(tmp_path, capsys):
    pytest.importorskip("torchft")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "evenstep", "run", "--elastic", "1:2", "--run-dir", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "worker 0 was killed by SIGKILL; it is started again" in done.stderr
    assert "finished 1 500" in done.stdout
    assert re.search(r"evenstep: lb-bsp: 500 steps; members [01 ]+; [23] joined, 1 died; steps that did", done.stderr)
    summary = summarise(tmp_path / "run")
    # What a process did in the step in which it was killed counts, but it had no time to record it.
    assert 3992 <= sum(each.samples for each in summary.workers) <= 4000
    assert summary.elastic.not_counted <= 2, "the one in which it died, and that in which it was back"
    assert top.main([str(tmp_path / "run"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert summary.elastic.text in shown
    assert "worker 0 was killed by SIGKILL" in shown


@pytest.mark.multiprocess
def test_a_script_that_fails_at_once_ends_the_run_with_an_error(tmp_path):
    pytest.importorskip("torchft")
    (tmp_path / "train.py").write_text("raise SystemExit('a mistake')")
    command = [sys.executable, "-m", "evenstep", "run", "--elastic", "1:1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert done.returncode == 1
    assert "worker 0 failed 3 times before its first step, and is not started again" in done.stderr
    assert "no replica finished" in done.stderr


@pytest.mark.parametrize("given", ["2", "0:2", "3:2", "a:b"])
def test_numbers_that_are_no_range_are_refused(given):
    with pytest.raises(ConfigError, match="the fewest and the most replicas"):
        run.parse(["--elastic", given, "train.py"])


def test_a_lighthouse_is_for_elastic_runs_and_has_an_address():
    with pytest.raises(ConfigError, match="--lighthouse must be an address"):
        run.parse(["--elastic", "1:2", "--lighthouse", "host0", "train.py"])
    with pytest.raises(ConfigError, match="--lighthouse is for elastic runs"):
        run.parse(["--lighthouse", "http://host0:29510", "train.py"])


def test_the_processes_of_a_replica_are_for_elastic_runs_and_at_least_one():
    with pytest.raises(ConfigError, match="--nproc-per-replica must be at least 1 process, not 0"):
        run.parse(["--elastic", "1:2", "--nproc-per-replica", "0", "train.py"])
    with pytest.raises(ConfigError, match="--nproc-per-replica is for elastic runs"):
        run.parse(["--nproc-per-replica", "2", "train.py"])

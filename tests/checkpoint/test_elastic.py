"""Workers and hosts die in mid-epoch, torchrun goes on with those that are left, and the run ends as if nothing had."""

import json
import signal
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from support.started import Started, ended, torchrun
from torch.distributed import TCPStore

from evenstep.report.summary import summarise

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 10, 3
SLICES = SAMPLES // GLOBAL_BATCH

pytestmark = pytest.mark.multiprocess


def test_a_killed_worker_costs_what_came_after_the_last_checkpoint(tmp_path):
    options = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    with Started(torchrun, *options, SCRIPT, tmp_path, "only") as agent:
        _, said = agent.communicate()
    assert agent.returncode == 0, said
    assert lives_of(tmp_path) == [2, 2]
    # The record has the events of both lives; that of the last start is the one that counts.
    assert [each.iterations for each in summarise(tmp_path / "run").workers] == [9, 9]


def test_a_host_that_is_gone_costs_what_came_after_the_last_checkpoint(tmp_path):
    stays, leaves, said = run_on_two_hosts(tmp_path)
    assert (stays, leaves) == (0, -signal.SIGKILL), said
    # Where a host starts late, the other one begins without it.
    assert lives_of(tmp_path)[-2:] == [2, 1]
    assert [each.worker for each in summarise(tmp_path / "run").workers] == [0]


def run_on_two_hosts(folder):
    """The exit codes of both hosts' agents, and what the first one said."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    # A host that is silent for two seconds is taken for lost, instead of 15, and two, instead of 30, is how long others
    # are waited for.
    settings = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", settings, "--local-addr", "localhost"]
    words = ((*options, SCRIPT, folder, host) for host in ("stays", "leaves"))
    codes, (said, _) = ended([Started(torchrun, *each) for each in words])
    return *codes, said


def lives_of(folder):
    """How many workers each life of a run had, once the run is found to be as good as an undisturbed one."""
    lives = [stepped_on(folder, life) for life in range(len(list(folder.glob("life-*-worker-0.jsonl"))))]
    assert (folder / "killed").exists()
    # What counts of a life is what came before the point from which the next one went on: every sample once an epoch.
    counted = {}
    for _, seen in lives:
        counted = {place: numbers for place, numbers in counted.items() if place < min(seen)} | seen
    assert min(lives[-1][1]) == divmod(6, SLICES)  # Of 8 iterations, with a checkpoint every 3.
    for epoch in range(EPOCHS):
        seen = [number for (when, _), numbers in counted.items() if when == epoch for number in numbers]
        assert sorted(seen) == list(range(SAMPLES))
    weights = json.loads((folder / "weights.json").read_text())
    np.testing.assert_allclose(weights, undisturbed(), rtol=0, atol=1e-10)
    return [count for count, _ in lives]


def stepped_on(folder, life):
    """How many workers there were in that life, and (epoch, iteration) -> the samples that any of them stepped on."""
    seen, count = {}, 0
    for notes in folder.glob(f"life-{life}-worker-*.jsonl"):
        for line in notes.read_text().splitlines():
            epoch, iteration, count, numbers = json.loads(line)
            seen.setdefault((epoch, iteration), []).extend(numbers)
    return count, seen


def undisturbed():
    """The weights of the same training in one process, in plain torch."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch))
        for part in order.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

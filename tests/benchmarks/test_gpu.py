"""The suite for GPUs, as far as a CPU can run it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import gpu_parity
from harness.workers import run_workers

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
CHECKS = {check.name: check for check in gpu_parity.CHECKS}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["sizes that always change", "bsp on a server", "FSDP2"])
def test_parity_can_be_shown_without_a_gpu(monkeypatch, name):
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    check = CHECKS[name]
    found = run_workers(check.workers, gpu_parity.difference, (check, "cpu"))
    assert found["difference"] <= check.tolerance
    assert len(set(found["sizes of worker 0"])) > 1 or check.scheme != gpu_parity.CHANGING


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_can_be_run():
    done = subprocess.run([sys.executable, SUITE], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no CUDA device here: --device cpu runs what needs none" in done.stderr

"""The examples run, alone and under torchrun, and the two DDP scripts differ by what the README says."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.core.cluster import parse_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SHORT = {
    "ddp_plain.py": ("--epochs", "1"),
    "ddp_evenstep.py": ("--epochs", "1"),
    "char_lm.py": ("--iterations", "3", "--report-every", "1", "--global-batch-size", "8", "--width", "32"),
}


def run_example(script, *launcher):
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / script, *SHORT[script]],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ddp_scripts_differ_by_the_import_and_one_line():
    plain, ours = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_plain.py", "ddp_evenstep.py"))
    changes = [line for line in difflib.ndiff(plain, ours) if line[:2] in ("+ ", "- ")]
    assert [line for line in changes if line.strip() != "+"] == [
        "+ import evenstep",
        "+     model, optimizer, loader = evenstep.prepare(model, optimizer, loader)",
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["alone", "torchrun"])
@pytest.mark.parametrize("script", ["ddp_plain.py", "ddp_evenstep.py"])
def test_digits(script, launcher):
    assert run_example(script, *launcher).startswith("epoch 1: test accuracy ")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("launcher", "sizes"), [((), "[8]"), (TORCHRUN, "[4, 4]")], ids=["alone", "torchrun"])
def test_character_language_model(launcher, sizes):
    lines = run_example("char_lm.py", *launcher).splitlines()
    assert lines[0].startswith("iteration 1: ")
    assert lines[0].endswith(f"bits per character, batch sizes {sizes}")
    assert lines[-2].startswith("on text held out: ")
    assert lines[-1].startswith("it writes: 'def ")


def test_the_cluster_file_describes_four_workers():
    assert len(parse_cluster((EXAMPLES / "cluster.toml").read_text())) == 4

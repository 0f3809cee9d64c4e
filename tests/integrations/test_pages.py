"""The scripts on the pages of the integrations run, on less data, under the launchers that the pages name."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PAGES = Path(__file__).parents[2] / "docs/integrations"
LAUNCH = "accelerate.commands.accelerate_cli launch --multi_gpu --num_processes 2 --main_process_port 0 train.py"
LESS = {
    "accelerate.md": {"41000": "9000", "40000": "8000"},
    "lightning.md": {"40000": "8000"},
    "transformers.md": {"(2000, 1)": "(400, 1)"},
}
LAUNCHERS = {
    "accelerate launch": LAUNCH,
    "evenstep run": "evenstep.cli.main run --workers 2 --slow 1=3x train.py",
}


def printed(page, folder, launcher):
    """What the first script of the page prints."""
    script = re.search(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    text = script[1]
    for much, less in LESS[page].items():
        assert text.count(much) == 1
        text = text.replace(much, less)
    (folder / "train.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", *LAUNCHERS[launcher].split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_for_accelerate(launcher, tmp_path):
    pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'evenstep[accelerate]'")
    said = printed("accelerate.md", tmp_path, launcher)
    assert re.search(r"epoch 3: an error of 0\.\d+ on 1000 samples", said)
    assert "lb-bsp" in said


# Its import would leave a variable in the environment of the other tests.
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning: pip install 'evenstep[lightning]'")
def test_the_script_for_lightning(tmp_path):
    assert "evenstep: lb-bsp trained" in printed("lightning.md", tmp_path, "evenstep run")


def test_the_script_for_transformers(tmp_path):
    pytest.importorskip("transformers", reason="needs Transformers: pip install 'evenstep[transformers]'")
    said = printed("transformers.md", tmp_path, "evenstep run")
    assert "evenstep/waiting" in said
    assert "eval_loss" in said

"""The scripts on the pages of the integrations run, on less data or narrower models, under launchers of the pages."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.started import Started, evenstep

pytestmark = pytest.mark.multiprocess

PAGES = Path(__file__).parents[2] / "docs/integrations"
LESS = {
    "accelerate.md": {"41000": "9000", "40000": "8000", "1024": "64"},
    "lightning.md": {"40000": "8000", "1024": "64"},
    "transformers.md": {"(2000, 1)": "(400, 1)", "n_embd=128": "n_embd=32"},
}


def accelerate(*words):
    """`accelerate WORDS`."""
    from accelerate.commands.accelerate_cli import main

    sys.argv = ["accelerate", *words]
    return main()


def within(folder, launcher, *words):
    os.chdir(folder)
    return launcher(*words)


def printed(page, folder, launcher, *words):
    """What the first script of the page prints."""
    script = re.search(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    text = script[1]
    for much, less in LESS[page].items():
        assert much in text
        text = text.replace(much, less)
    (folder / "train.py").write_text("import support.lean_torch\n" + text)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with Started(within, folder, launcher, *words, "train.py", environment=environment) as process:
        out, error = process.communicate()
    assert process.returncode == 0, error
    return out + error


def under_evenstep(page, folder):
    return printed(page, folder, evenstep, "run", "--workers", 2, "--slow", "1=3x")


def test_the_script_for_accelerate(tmp_path):
    pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'evenstep[accelerate]'")
    options = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    said = printed("accelerate.md", tmp_path, accelerate, "launch", *options)
    assert re.search(r"epoch 3: an error of 0\.\d+ on 1000 samples", said)
    assert "lb-bsp" in said


# Its import would leave a variable in the environment of the other tests.
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning: pip install 'evenstep[lightning]'")
def test_the_script_for_lightning(tmp_path):
    assert "evenstep: lb-bsp trained" in under_evenstep("lightning.md", tmp_path)


def test_the_script_for_transformers(tmp_path):
    pytest.importorskip("transformers", reason="needs Transformers: pip install 'evenstep[transformers]'")
    said = under_evenstep("transformers.md", tmp_path)
    assert "evenstep/waiting" in said
    assert "eval_loss" in said

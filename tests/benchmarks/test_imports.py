"""Every benchmark finds what it imports, although none of them is run by the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
IMPORT_ALL = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


@pytest.mark.multiprocess
def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(names) > 40

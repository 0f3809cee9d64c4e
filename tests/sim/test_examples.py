"""Every cluster of examples/clusters does something that its comment says."""

import shlex
from pathlib import Path

import pytest

from evenstep.cli.main import main

CLUSTERS = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))


def command_of(path):
    """The command in the comment at the top of the file."""
    lines = [line.lstrip("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line for line in lines[[line.startswith("evenstep") for line in lines].index(True) :])
    return shlex.split(text.replace("\\", ""))


def test_there_are_examples():
    assert len(CLUSTERS) >= 8


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_needs_no_further_options(path, capsys):
    assert main(["simulate", str(path), "--iterations", "2", "--json"]) == 0
    assert '"simulated": true' in capsys.readouterr().out


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_command_in_its_comment_works(path, capsys, monkeypatch):
    monkeypatch.chdir(path.parents[2])
    command = command_of(path)
    assert command[:2] == ["evenstep", "simulate"]
    assert command[2] == f"examples/clusters/{path.name}"
    iterations = "2" if path.stem == "spot" else "20"
    assert main([*command[1:], "--iterations", iterations]) == 0
    assert "speed-up" in capsys.readouterr().out

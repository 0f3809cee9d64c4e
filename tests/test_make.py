"""The targets of the Makefile, with a program that notes how it is called in place of the environment's Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """#!/bin/sh
echo "$@" >> calls
case "$*" in *"{fails}"*) exit 1;; esac
"""


def make(folder, target, fails="nothing"):
    """Run the target in this folder; the calls that it makes fail where they have these words."""
    constraints = [path.name for path in ROOT.glob("constraints*.txt")]
    for framework in (name.removeprefix("constraints").removesuffix(".txt") for name in constraints):
        programs = folder / f".venv{framework}" / "bin"
        programs.mkdir(parents=True)
        for name in ("python", "evenstep"):
            (programs / name).write_text(PROGRAM.format(fails=fails))
            (programs / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml", *constraints):
        shutil.copy(ROOT / name, folder)
    # The first program that it calls makes the environment, which is there.
    ended = subprocess.run(
        ["make", "--no-print-directory", "PYTHON=true", target],
        cwd=folder,
        env={**os.environ, "MAKEFLAGS": ""},  # This may run under make, too.
        capture_output=True,
        text=True,
        check=False,
    )
    return ended, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("fails", "codes"), [("not alone", "1 of tests beside"), ("-m alone", "1 of tests alone"), ("nothing", "")]
)
def test_the_second_half_of_the_tests_runs_where_the_first_fails_and_either_fails_the_target(fails, codes, tmp_path):
    ended, calls = make(tmp_path, "test", fails)
    halves = [call for call in calls if call.startswith("-m pytest")]
    assert len(halves) == 2
    assert halves[0].startswith("-m pytest -m not alone")
    assert halves[1].startswith("-m pytest -m alone")
    assert (ended.returncode != 0) == bool(codes)
    assert codes in ended.stdout.splitlines()[-1]


def test_the_demo_installs_nothing_that_only_development_needs(tmp_path):
    ended, calls = make(tmp_path, "demo")
    assert ended.returncode == 0, ended.stderr
    assert calls == ["-m pip install --constraint constraints.txt --editable .[torch]", "demo"]


def test_all_tests_are_the_tests_after_every_framework_is_installed_and_then_those_of_frameworks(tmp_path):
    ended, calls = make(tmp_path, "test-all")
    assert ended.returncode == 0, ended.stderr
    tests = [call for call in calls if call.startswith("-m pytest")]
    installed = calls[: -len(tests)]
    assert calls == [*installed, *tests]
    assert any("ray" in call for call in installed)
    assert any("--constraint constraints-jax.txt --editable .[jax] flax optax" in call for call in installed)
    assert len(tests) >= 3
    assert set(tests[2:]) == {"-m pytest tests/frameworks -m not faults --numprocesses 3 --dist loadgroup"}


def test_a_framework_that_cannot_be_installed_fails_all_tests(tmp_path):
    ended, calls = make(tmp_path, "test-all", fails="constraints-jax.txt")
    assert ended.returncode != 0
    assert not any(call.startswith("-m pytest") for call in calls)

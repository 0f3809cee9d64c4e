"""What a bug report is made of."""

import json
import subprocess
import sys

from support.guard import GUARD_SECONDS

from evenstep import __version__
from evenstep.cli.main import main


def test_it_tells_versions_and_backends_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("EVENSTEP_SECRET", "abc")
    monkeypatch.setenv("EVENSTEP_SCHEME", "dbs")
    assert main(["env", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["evenstep"] == __version__
    assert found["EVENSTEP_SCHEME"] == "dbs"
    assert "gloo" in found["backends"]
    assert "abc" not in said


def test_as_text_each_line_is_a_name_and_what_it_is(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["evenstep"] == __version__
    assert "usable of" in lines["processors"]


def test_python_m_evenstep_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "--version"],
        capture_output=True, text=True, timeout=GUARD_SECONDS, check=True,
    )  # fmt: skip
    assert done.stdout == f"evenstep {__version__}\n"

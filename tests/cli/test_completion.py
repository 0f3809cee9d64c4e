"""What a shell offers after `evenstep`, asked of a real bash."""

import shutil
import subprocess

import pytest
from support.guard import GUARD_SECONDS

from evenstep.cli.main import SUBCOMMANDS, main
from evenstep.schemes import RECIPES

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", said.append)
        assert main(["completion", "bash"]) == 0
    return said[0]


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["evenstep", ""], set(SUBCOMMANDS)),
        (["evenstep", "sim"], {"simulate"}),
        (["evenstep", "run", "--sch"], {"--scheme"}),
        (["evenstep", "run", "--scheme", ""], set(RECIPES)),
        (["evenstep", "run", "--workers", "2", "tr"], {"train.py"}),
        (["evenstep", "report", "tr"], {"train.py"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(script, tmp_path, typed, offered):
    (tmp_path / "train.py").touch()
    words = " ".join(f"'{word}'" for word in typed)
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _shtab_evenstep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [BASH, "-c", f"{script}\n{ask}"], cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_SECONDS
    )
    assert offered <= set(done.stdout.split()), done.stderr


def test_another_shell_is_refused_with_those_that_there_are(capsys):
    assert main(["completion", "pash"]) == 2
    assert "'pash' (choose from 'bash', 'zsh'" in capsys.readouterr().err

import subprocess
import sys

import pytest

from evenstep import __version__
from evenstep.cli.main import SUBCOMMANDS, main


def python(code):
    """Run the code in a process of its own, as a user without some package would."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


def test_help_lists_every_subcommand_with_one_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, each in SUBCOMMANDS.items():
        assert f"  {name:<8} {each.summary}" in lines


def test_without_arguments_help_is_shown(capsys):
    assert main([]) == 0
    assert "usage: evenstep" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_of_each_subcommand_ends_with_an_example(subcommand, option, capsys):
    assert main([subcommand, option]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-2] == "example:"
    assert lines[-1].startswith(f"  evenstep {subcommand} ")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"evenstep {__version__}\n"


def test_help_needs_no_torch():
    done = python(
        "import sys\n"
        "from evenstep.cli.main import SUBCOMMANDS, main\n"
        "assert all(main(each) == 0 for each in (['--help'], *([each, '--help'] for each in SUBCOMMANDS)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "sentence"),
    [
        ("torch", ["run", "train.py"], "evenstep: evenstep run needs PyTorch: pip install 'evenstep[torch]'"),
        ("torch", ["demo"], "evenstep: evenstep demo needs PyTorch: pip install 'evenstep[demo]'"),
        ("plotly", ["report", "."], "evenstep report needs plotly for its page: pip install 'evenstep[report]'"),
        ("sklearn", ["demo"], "needs scikit-learn for its images of digits: pip install 'evenstep[demo]'"),
    ],
)
def test_a_missing_package_is_one_sentence(package, arguments, sentence):
    hide = f"import sys; sys.modules[{package!r}] = None"
    done = python(f"{hide}\nfrom evenstep.cli.main import main\nsys.exit(main({arguments!r}))")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1

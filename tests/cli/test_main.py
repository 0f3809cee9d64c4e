import os
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS
from support.made_log import write_log

from evenstep import __version__
from evenstep.cli.main import SUBCOMMANDS, main


def python(code):
    """Run the code in a process of its own, as a user without some package would."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_SECONDS, check=False
    )


def test_help_lists_every_subcommand_with_one_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, summary in SUBCOMMANDS.items():
        assert f"  {name:<10} {summary}" in lines


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


@pytest.mark.multiprocess
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["--help", "simulate CLUSTER --iterations 5", "simulate CLUSTER --iterations 5 --json", "top RUN --json"]
)
def test_a_reader_that_has_read_enough_is_no_error(command, unbuffered, tmp_path):
    (tmp_path / "cluster.toml").write_text('[devices.d]\nper_sample = "1 ms"\n[[workers]]\ndevice = "d"\ncount = 2\n')
    write_log(tmp_path, ((0.001, 0.020, 0.001),) * 2)
    words = command.replace("CLUSTER", str(tmp_path / "cluster.toml")).replace("RUN", str(tmp_path)).split()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "evenstep.cli.main", *words],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1


@pytest.mark.multiprocess
def test_output_that_cannot_be_written_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "evenstep.cli.main", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "evenstep: the output cannot be used (No space left on device): give another\n"
    assert done.returncode == 2


def test_the_name_of_a_run_commands_no_terminal(tmp_path, capsys):
    run = write_log(tmp_path / "a\x1b]0;b\x07", [(0.001, 0.02, 0.001)])
    write_log(tmp_path / "b", [(0.001, 0.02, 0.001)])
    for arguments in (["top", str(run)], ["top", f"{run} nowhere"], ["report", "--json", str(tmp_path)]):
        main(arguments)
        said = capsys.readouterr()
        assert not {"\x1b", "\x07"} & {*said.out, *said.err}


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
        ("torch", ["run", "train.py"], "evenstep: evenstep run needs PyTorch: pip install torch,"),
        ("torch", ["demo"], "evenstep: evenstep demo needs PyTorch: pip install torch,"),
    ],
)
def test_a_missing_package_is_one_sentence(package, arguments, sentence):
    hide = f"import sys; sys.modules[{package!r}] = None"
    done = python(f"{hide}\nfrom evenstep.cli.main import main\nsys.exit(main({arguments!r}))")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1

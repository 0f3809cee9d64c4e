import os
from pathlib import Path

import pytest

from evenstep.cli.main import main

SCRIPT = str(Path(__file__).parent / "scripts" / "tells.py")
CLUSTER = '[devices.old]\nper_sample = "1 ms"\n[[workers]]\ndevice = "old"\ncount = 3\n'


@pytest.fixture
def files(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "wrong-key.toml").write_text(CLUSTER.replace("count", "cuont"))
    (tmp_path / "wrong-unit.toml").write_text(CLUSTER.replace("1 ms", "1 minute"))
    spots = '[spots.now]\nstays = "9 s"\naway = "1 s"\n'
    (tmp_path / "spots.toml").write_text(spots + CLUSTER + 'spot = "now"\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "worker-0.jsonl").write_text("")
    (tmp_path / "demo" / "bsp").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000 + "]" * 100_000)
    with (tmp_path / "large.toml").open("w") as large:
        large.truncate(17 << 20)
    os.mkfifo(tmp_path / "pipe.toml")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("rnu train.py", "there is no subcommand 'rnu': did you mean 'run'?"),
        ("run", "needs a training script"),
        ("run --workers 2", "needs a training script"),
        ("run --workers", "argument --workers: expected one argument"),
        ("run nowhere.py", "there is no script 'nowhere.py'"),
        ("run -m nowhere.train", "there is no module 'nowhere'"),
        ("run --no-python nowhere", "there is no program 'nowhere'"),
        ("run --slwo 3=4x SCRIPT", "no argument '--slwo': did you mean '--slow'?"),
        ("run --workers many SCRIPT", "--workers must be a number"),
        ("run --workers 0 SCRIPT", "--workers must be at least 1, not 0"),
        ("run --framework keras SCRIPT", "argument --framework: invalid choice"),
        (
            "run --nnodes 2 --framework jax SCRIPT",
            "--framework jax lets workers of one host meet: on several",
        ),
        ("run --workers 99999999999 SCRIPT", "--workers must be at most 1024 on one host, not 99999999999"),
        ("run --workers 99999999999 --scheme grouped:groups=2 SCRIPT", "--workers must be at most 1024 on one host"),
        (
            "run --nnodes some SCRIPT",
            "--nnodes must be a number or MINIMUM:MAXIMUM, of at most 99999 nodes, not 'some'",
        ),
        ("run --nnodes 99999999999 SCRIPT", "of at most 99999 nodes, not '99999999999'"),
        ("run --workers 2 --scheme grouped:groups=9 SCRIPT", "2 workers cannot be in 9 groups: use 2 or fewer"),
        ("run --scheme asp:servers=1000000 SCRIPT", "1000000 servers cannot hold the parameters: use 1 to 128"),
        ("run --scheme ssp,bound=3 SCRIPT", "did you mean 'ssp:bound=3'?"),
        ("run --run-dir= SCRIPT", "argument --run-dir: needs a path, not an empty text"),
        ("run --resume= --scheme asp SCRIPT", "argument --resume: needs a path, not an empty text"),
        ("run --emulate= SCRIPT", "argument --emulate: needs a path, not an empty text"),
        ("run HERE/used", "is a folder without a __main__.py: name the script in it"),
        ("run --emulate HERE/deep.toml SCRIPT", "deep.toml: this is nested too deeply for a cluster file"),
        ("run --emulate /dev/zero SCRIPT", "the cluster file /dev/zero cannot be read (it is not a regular file)"),
        ("run --emulate HERE/large.toml SCRIPT", "large.toml cannot be read (it is larger than 16 MB): give"),
        ("simulate HERE/pipe.toml", "pipe.toml cannot be read (it is not a regular file): give a TOML file"),
        ("simulate HERE/deep.toml", "deep.toml: this is nested too deeply for a cluster file"),
        (f"run {'x' * 5000}", "xxx cannot be used (File name too long): give another"),
        ("demo --run-dir=", "argument --run-dir: needs a path"),
        ("export --trace= HERE/used", "argument --trace: needs a path"),
        ("run --nnodes 2:1 SCRIPT", "min_nodes"),
        (
            "run --rdzv-backend nope SCRIPT",
            "backend 'nope' is not registered. Did you forget to call `register`?): check",
        ),
        ("run --monitor-interval -1 SCRIPT", "--monitor-interval must be above 0 seconds, not -1"),
        ("run --event-log-handler nope SCRIPT", "no event log handler 'nope': give null or console"),
        ("run --rdzv-backend etcd SCRIPT", "did not find each other (The 'etcd' module is required"),
        ("run --rdzv-backend c10d --rdzv-endpoint here:99999 SCRIPT", "'here:99999' must be an integer between 0 and"),
        ("run --scheme lbbsp SCRIPT", "there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        (
            "run --workers 3 --scheme grouped:groups=0/1 SCRIPT",
            "do not have each of the workers 0 to 2 once: name every",
        ),
        ("run --scheme lb-bsp:predicter=ema SCRIPT", "no parameter 'predicter': did you mean 'predictor'?"),
        ("run --workers 4 --slow 4=2x SCRIPT", "names worker 4, but the 4 workers are numbered from 0 to 3"),
        ("run --slow 3=4x SCRIPT", "names worker 3, but there is worker 0 only"),
        ("run --workers 4 --slow 3=0.5x SCRIPT", "--slow 3=0.5x"),
        ("run --workers 4 --slow fast SCRIPT", "such as 3=4x"),
        ("run --workers 4 --emulate HERE/cluster.toml SCRIPT", "describes 3 workers but 4 are to be started"),
        ("run --workers 3 --emulate HERE/spots.toml SCRIPT", "only evenstep simulate can follow: leave out spot"),
        ("run --workers 3 --emulate HERE/nowhere.toml SCRIPT", "nowhere.toml cannot be read"),
        ("run --workers 3 --emulate HERE/wrong-key.toml SCRIPT", "did you mean 'count'?"),
        ("run --workers 3 --emulate HERE/wrong-unit.toml SCRIPT", "units: s, ms, us"),
        ("run --run-dir HERE/used SCRIPT", "holds the events of a run already"),
        ("run --run-dir HERE/file SCRIPT", "cannot be written"),
        ("run --run-dir HERE/file/below SCRIPT", "cannot be written"),
        ("demo --run-dir HERE/demo", "holds a demo already"),
        ("demo --run-dir HERE/file", "cannot be written"),
        ("demo --report HERE/nowhere/page.html", "cannot be written (No such file or directory): give another"),
        (f"demo --report {'x' * 300}", "cannot be written (File name too long): give another path"),
        ("plan --save-cluster HERE -- SCRIPT", "cannot be written (Is a directory): give another path"),
        ("plan --save-cluster HERE/nowhere/a.toml -- SCRIPT", "cannot be written (No such file or directory)"),
        ("demo fast", "evenstep demo has no argument 'fast'"),
    ],
)
def test_is_refused_in_one_sentence_before_any_worker_starts(arguments, fragment, files, capfd):
    words = arguments.replace("HERE", str(files)).replace("SCRIPT", SCRIPT).split()
    told = files / "told"
    told.mkdir()
    assert main([*words, *([str(told)] if SCRIPT in words else [])]) == 2
    error = capfd.readouterr().err
    sentence = error.splitlines()[-1]
    assert sentence.startswith("evenstep: ")
    assert fragment in sentence
    assert "Traceback" not in error
    assert not list(told.iterdir())

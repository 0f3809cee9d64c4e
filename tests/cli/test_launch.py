import json
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.guard import GUARD_SECONDS
from support.records import check_records
from support.server_reports import Reports, stand_in
from support.started import Started, evenstep

from evenstep.cli.main import main
from evenstep.cli.run import parse
from evenstep.core.ending import Ending
from evenstep.launch.launch import launch
from evenstep.launch.launch_settings import VARIABLES, LaunchSettings
from evenstep.launch.run_failed import RunFailedError, failure_of_all
from evenstep.telemetry import read_events
from evenstep.telemetry.events import Disturbed, RanOutOfMemory, ServersRestarted

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"
CLUSTER = '[devices.old]\nper_sample = "1 ms"\n[[workers]]\ndevice = "old"\ncount = 2\n'


def run(*words):
    return main(["run", *map(str, words)])


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_killed_worker_is_named_with_its_signal(name, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONFAULTHANDLER")  # Else Python says what it did.
    assert run("--workers", 3, SCRIPTS / "ends.py", 1, name) == 128 + getattr(signal, name)
    error = capfd.readouterr().err
    assert error.startswith(f"evenstep: worker 1 was killed by {name}")
    assert error.count("\n") == 1


def test_a_worker_that_exits_is_named_with_its_code(capfd):
    assert run("--workers", 3, SCRIPTS / "ends.py", 2, 3) == 3
    assert capfd.readouterr().err.startswith("evenstep: worker 2 ended with exit code 3: ")


def test_workers_of_tensorflow_find_their_places_in_tf_config(tmp_path, capfd):
    script = tmp_path / "place.py"
    script.write_text('import os; print(os.environ["RANK"], os.environ["TF_CONFIG"])')
    assert run("--workers", 2, "--framework", "tensorflow", script) == 0
    places = dict(line.split(" ", 1) for line in capfd.readouterr().out.splitlines())
    first, second = (json.loads(places[rank]) for rank in "01")
    assert [each["task"] for each in (first, second)] == [{"type": "worker", "index": rank} for rank in range(2)]
    assert first["cluster"] == second["cluster"]
    assert len(set(first["cluster"]["worker"])) == 2


def test_an_error_of_evensteps_is_repeated(capfd):
    assert run("--workers", 2, SCRIPTS / "raises.py") == 1
    error = capfd.readouterr().err
    assert error.splitlines()[-1] == "evenstep: worker 1 ended with exit code 1: the batch is too small: raise it"
    assert "ConfigError: the batch is too small: raise it" in error  # in the worker's own traceback
    assert "ChildFailedError" not in error


def test_the_workers_get_the_options_and_the_script_its_arguments(tmp_path, monkeypatch, capfd):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    options = ["--scheme", "bsp", "--slow", "1=4x", "--slow", "0=+1ms", "--emulate", "cluster.toml", "--run-dir", "out"]
    options += ["--start-from", ".", "--max-restarts", "1"]
    for name in VARIABLES.values():
        monkeypatch.setenv(name, "" if name == "EVENSTEP_BATCH_SIZES" else "what an option replaces")
    monkeypatch.setenv("EVENSTEP_TIMEOUT", "42")
    script = SCRIPTS / "tells.py"
    assert run("--workers", 2, *options, "--", script, tmp_path, "--workers", 7, "--json", "x") == 0
    told = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(2)]
    for worker, each in enumerate(told):
        assert each["RANK"] == str(worker)
        assert each["WORLD_SIZE"] == "2"
        assert each["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
        assert each["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # A new one for each start of the workers.
        assert each["arguments"] == ["--workers", "7", "--json", "x"]
        settings = json.loads(each["EVENSTEP_LAUNCH"])
        assert not Path(settings.pop("marks")).exists()
        assert settings == {
            "resume": False,
            "servers": [],
            "heartbeat_seconds": 20.0,
            "survey_up_to": None,
            "elastic": None,
            "lighthouse": None,
            "nproc_per_replica": 1,
        }
        assert {name: each[name] for name in VARIABLES.values()} == {
            "EVENSTEP_SCHEME": "bsp",
            "EVENSTEP_BATCH_SIZES": "",
            "EVENSTEP_SLOW": "1=4x,0=+1ms",
            "EVENSTEP_EMULATE": str(tmp_path / "cluster.toml"),
            "EVENSTEP_RUN_DIR": str(tmp_path / "out"),
            "EVENSTEP_TIMEOUT": "42",
            "EVENSTEP_START_FROM": str(tmp_path),
        }
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] != "29500"
    assert capfd.readouterr().err == (
        f"evenstep: {script} never called evenstep.prepare, so it ran without evenstep; --scheme, --slow, --emulate,"
        " --run-dir and --start-from had no effect\n"
    )


def test_options_of_ours_after_the_script_are_warned_of_and_are_the_scripts(tmp_path, capfd):
    takes = tmp_path / "takes.py"
    takes.write_text("import sys\nprint(sys.argv[1:])  # takes --json\n")
    assert run(takes, "--workers", 2, "--scheme=bsp", "--json", "--epochs", 3, "--worker") == 0
    said = capfd.readouterr()
    assert said.out == "['--workers', '2', '--scheme=bsp', '--json', '--epochs', '3', '--worker']\n"
    assert said.err.splitlines()[:-1] == [
        f"evenstep: {name} stands after {takes}, which gets it: put it before {takes} if it is meant for evenstep run"
        for name in ("--workers", "--scheme")
    ]
    assert run("--", takes, "--workers", 2) == 0
    assert run("--workers", 1, takes, "--", "--workers", 2) == 0
    assert "stands after" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "before", ["", "--workers 3", "--workers=3 -t3", "-r 1 --max_restarts -1", "--slow 1=2x -m", "--"]
)
@pytest.mark.parametrize("after", ["", "--n 3", "--n=3 -t --m --run", "x -- --n", "-h", "--workers"])
def test_what_stands_after_the_script_is_never_taken_for_an_option(before, after):
    options = parse([*before.split(), "train.py", *after.split()])
    assert options.training_script == "train.py"
    assert options.training_script_args == after.split()


def test_a_script_gets_an_argument_that_could_be_several_options(tmp_path, capfd):
    takes = tmp_path / "takes.py"
    takes.write_text("import sys\nprint(sys.argv[1:])\n")
    assert run(takes, "--n", 3) == 0
    assert capfd.readouterr().out == "['--n', '3']\n"


def test_torchruns_names_keep_their_meaning(tmp_path):
    assert run("--nproc-per-node", 2, "--standalone", SCRIPTS / "tells.py", tmp_path) == 0
    assert run("--nproc_per_node=1", "--master-port", 0, "-m", "json.tool", "--help") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_the_process_is_what_it_was_before(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert run(SCRIPTS / "tells.py", tmp_path) == 0
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_everything_that_it_started(number, code):
    with Started(evenstep, "run", "--workers", 2, SCRIPTS / "waits.py") as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 4
        launcher.send_signal(number)
        _, error = launcher.communicate()
    assert launcher.returncode == code
    assert error == f"evenstep: ended by {number.name}: every worker was stopped\n"
    assert_gone(pids)


def assert_gone(pids):
    """Soon: what was killed by a process that has ended meanwhile is init's to clear away."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=GUARD_SECONDS)
    assert not alive


SMALL_MEMORY = """
[devices.small]
per_sample = "1 ms"
memory = "1 GB"
memory_per_sample = "100 MB"
[devices.large]
per_sample = "1 ms"
[disturbances.spell]
kind = "from"
factor = 2
first = 3
until = 7
[[workers]]
device = "large"
disturb = ["spell"]
[[workers]]
device = "small"
"""


def test_a_batch_that_ran_out_of_memory_is_named_and_not_tried_again(tmp_path, capfd):
    (tmp_path / "cluster.toml").write_text(SMALL_MEMORY)
    options = ["--workers", 2, "--emulate", tmp_path / "cluster.toml", "--run-dir", tmp_path / "run"]
    assert run(*options, SCRIPTS / "trains.py", 12) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert "worker 1 ran out of memory with a batch of 12 samples: start again with the same run directory" in last
    (event,) = read_events(tmp_path / "run", kind=RanOutOfMemory)
    assert (event.worker, event.samples) == (1, 12)
    # The other worker may be ended by the launcher before it finds out.
    last = [event for event in read_events(tmp_path / "run") if event.worker == 1][-2:]
    assert [event.kind for event in last] == ["error", "end"]
    assert last[0].type == "OutOfMemoryError"
    assert last[0].text.startswith("worker 1 ran out of memory with a batch of 12 samples: start again")
    # Nothing smaller has run, so the second start begins at half of it, and learns what fits from there.
    assert run(*options, SCRIPTS / "trains.py", 12) == 0
    plans = [event for event in read_events(tmp_path / "run") if event.kind == "plan"]
    assert plans[0].batch_sizes == [12, 12]
    assert plans[1].batch_sizes == [18, 6]
    assert all(plan.batch_sizes[1] <= 10 for plan in plans[1:])
    told = read_events(tmp_path / "run", kind=Disturbed)
    assert [(event.worker, event.iteration, event.factor) for event in told] == [(0, 3, 2.0), (0, 7, 1.0)]
    assert {"run", "iteration", "out_of_memory", "end"} <= check_records(tmp_path / "run")


# Under a scheme with servers, for which other programs stand in.


@pytest.fixture
def reports():
    with closing(Reports()) as reports:
        yield reports


def launch_served(reports, *words, scheme="asp", run_dir=None, resume=False):
    settings = LaunchSettings(scheme=scheme, run_dir=None if run_dir is None else str(run_dir), resume=resume)
    return launch(parse(list(map(str, words))), settings, server_command=stand_in(reports))


def test_servers_start_before_the_workers_and_end_after_them(reports, tmp_path, capfd):
    words = ("--workers", 2, SCRIPTS / "tells.py", tmp_path)
    assert launch_served(reports, *words, scheme="ssp:servers=2", run_dir=tmp_path / "run") == []
    servers = [reports.next(), reports.next()]
    for server in servers:
        assert server.told["workers"] == 2
        assert server.told["snapshots"] == str(tmp_path / "run" / "snapshots")
        assert server.after_listening() == [{"event": "ended", "by": "signal"}]
    for worker in range(2):
        told = json.loads((tmp_path / f"{worker}.json").read_text())
        settings = json.loads(told["EVENSTEP_LAUNCH"])
        assert [addresses[0] for addresses in settings["servers"]] == [
            f"unix:@stand-in-{server.pid}" for server in reversed(servers)
        ]
        assert told["EVENSTEP_SECRET"] == servers[0].started["secret"]
        assert told["RANK"] == str(worker)
    said = capfd.readouterr().err.splitlines()
    assert not [line for line in said if "still runs" not in line]  # On a busy machine one worker may be a second late.
    assert "EVENSTEP_SECRET" not in os.environ


def test_the_environment_chooses_a_scheme_on_servers(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("EVENSTEP_SCHEME", "ssp:servers=2")
    monkeypatch.setenv("EVENSTEP_SLOW", " ")
    assert run(SCRIPTS / "tells.py", tmp_path) == 0
    told = json.loads((tmp_path / "0.json").read_text())
    assert (told["EVENSTEP_SCHEME"], told["EVENSTEP_SLOW"].strip()) == ("ssp:servers=2", "")
    assert len(json.loads(told["EVENSTEP_LAUNCH"])["servers"]) == 2
    assert "had no effect" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("EVENSTEP_SCHEME", "lbbsp", "EVENSTEP_SCHEME: there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ("EVENSTEP_SLOW", "0=2x,2=4x", "EVENSTEP_SLOW 2=4x names worker 2, but the 2 workers are numbered from 0 to 1"),
        ("EVENSTEP_SLOW", "fast", "EVENSTEP_SLOW needs a rank and how much slower, such as 3=4x"),
        ("EVENSTEP_EMULATE", "nowhere.toml", "EVENSTEP_EMULATE: the cluster file "),
        ("EVENSTEP_RUN_DIR", "/dev/null/run", "EVENSTEP_RUN_DIR: the run directory /dev/null/run cannot be written"),
        ("EVENSTEP_TIMEOUT", "soon", "EVENSTEP_TIMEOUT must be a positive number of seconds, at most 1e+09, not"),
    ],
)
def test_a_wrong_variable_is_named_before_a_worker_starts(variable, text, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(variable, text)
    assert run("--workers", 2, SCRIPTS / "tells.py", tmp_path) == 2
    assert f"evenstep: {sentence}" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_run_directory_snapshots_go_where_nothing_is_left(reports, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    launch_served(reports, SCRIPTS / "tells.py", tmp_path)
    assert reports.next().told["snapshots"].startswith(str(tmp_path / "temporary"))
    assert list((tmp_path / "temporary").glob("evenstep-*")) == []


def test_the_others_finish_when_workers_are_lost_which_are_named(reports, capfd):
    lost = launch_served(reports, "--workers", 4, SCRIPTS / "loses.py", "0", "SIGKILL", "3", "0")
    then = "the others finished without it"
    assert sorted(lost) == [
        f"worker 1 was killed by SIGKILL, which is what a system out of memory does; {then}",
        f"worker 2 ended with exit code 3: its own output above tells why; {then}",
    ]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("evenstep: ")]
    # The others may have finished by the time that a keeper tells of an end.
    assert sorted(line.removesuffix("; the others go on") for line in said) == [
        "evenstep: worker 1 was killed by SIGKILL",
        "evenstep: worker 2 ended with exit code 3",
    ]


def test_a_run_of_which_no_worker_finished_has_failed(reports):
    with pytest.raises(RunFailedError, match=r"^worker 1 was killed by SIGSEGV; no worker finished$") as failed:
        launch_served(reports, "--workers", 2, SCRIPTS / "loses.py", "worker 1 died", "SIGSEGV")
    assert (failed.value.worker, failed.value.exit_code) == (1, 139)
    assert reports.next().after_listening() == [{"event": "ended", "by": "signal"}]


def test_torchruns_max_restarts_is_how_often_a_lost_worker_is_started_again(reports, capfd):
    lost = launch_served(reports, "--workers", 2, "--max-restarts", 2, SCRIPTS / "loses.py", "0", "5")
    assert len(lost) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("worker 1")] == [f"worker 1 start {n}" for n in range(3)]
    assert lines.count("worker 0 start 0") == 1


def test_a_run_outlives_its_servers_which_start_again(reports, tmp_path, capfd):
    os.mkfifo(tmp_path / "go")

    def kill_and_go():
        with (tmp_path / "go").open("w"):  # waits for the worker, who then waits for its end
            os.kill(reports.next().pid, signal.SIGKILL)
            again = reports.next()
            assert again.told["resume"]
            assert again.next() == {"event": "listening"}
        return True

    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill_and_go)
        assert launch_served(reports, SCRIPTS / "awaits.py", tmp_path / "go", run_dir=tmp_path / "run") == []
        assert killed.result()
    text = "server 0 was killed by SIGKILL; all start again from their last snapshot (1 of 3)"
    assert capfd.readouterr().err == f"evenstep: {text}\n"
    (event,) = read_events(tmp_path / "run", role="launcher")
    assert event == ServersRestarted(server=0, restart=1, text=text, at=event.at)
    assert event.at > 0


def test_servers_that_are_lost_are_named_first(tmp_path):
    failures = [Ending(worker=1, exit_code=1, message="ServerError: gone: look")]
    failed = failure_of_all(failures, "server 0 was killed by SIGKILL; no restart is left of 3")
    assert str(failed).startswith(
        "server 0 was killed by SIGKILL; no restart is left of 3; without servers worker 1 end"
    )
    assert failed.exit_code == 1


def launch_stand_ins(server_command, *words):
    """`evenstep run` with stand-ins for its servers; returns the exit code."""
    options = parse(list(map(str, words)))
    try:
        launch(options, LaunchSettings(scheme=options.scheme), server_command=server_command)
    except RunFailedError as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    return 0


def served_launcher(reports, tmp_path, *words):
    environment = {"TMPDIR": str(tmp_path)}
    return Started(launch_stand_ins, stand_in(reports), "--scheme", "asp", *words, environment=environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_then_the_servers(reports, tmp_path, number):
    with served_launcher(reports, tmp_path, "--workers", "2", str(SCRIPTS / "waits.py")) as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
        server = reports.next()
        launcher.send_signal(number)
        # It ends when nobody has the other ends any more: workers, their children and keepers are gone.
        _, error = launcher.communicate()
    assert launcher.returncode == 128 + number
    assert error == f"ended by {number.name}: every worker was stopped\n"
    assert server.after_listening() == [{"event": "ended", "by": "signal"}]
    assert_gone([*pids, server.pid])
    assert list(tmp_path.glob("evenstep-*")) == []


def test_nothing_outlives_a_launcher_that_is_killed(reports, tmp_path):
    with served_launcher(reports, tmp_path, "--workers", "2", str(SCRIPTS / "waits.py")) as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
        server = reports.next()
        launcher.kill()
        launcher.communicate()
    assert server.after_listening() == [{"event": "ended", "by": "stdin"}]
    assert_gone([*pids, server.pid])


# Continuing a run.


def test_resume_goes_on_in_the_runs_directory(reports, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "snapshots" / "version-000000000007").mkdir(parents=True)
    (run_dir / "snapshots" / "version-000000000007" / "shard-0.pt").touch()
    (run_dir / "worker-0.jsonl").write_text('{"worker":0,"event":"run"}\n')
    launch_served(reports, SCRIPTS / "tells.py", tmp_path, run_dir=run_dir, resume=True)
    told = reports.next().told
    assert (told["resume"], told["snapshots"]) == (True, str(run_dir / "snapshots"))
    assert json.loads(json.loads((tmp_path / "0.json").read_text())["EVENSTEP_LAUNCH"])["resume"] is True


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resume", "run"], "--resume needs --scheme with the scheme of the run"),
        (["--resume", "run", "--scheme", "lb-bsp"], "(asp, ssp, dssp, grouped), not 'lb-bsp': use evenstep.checkpoint"),
        (["--resume", "run", "--scheme", "asp", "--run-dir", "x"], "leave out --run-dir"),
        (["--resume", "none", "--scheme", "asp"], "there is no snapshot of a run in "),
        (["--resume", "empty", "--scheme", "asp"], "there is no snapshot of a run in "),
        (["--resume", "run", "--scheme", "asp"], "there is no snapshot of a run in "),  # A stray file is none.
        (["--run-dir", "run", "--scheme", "asp"], "holds the snapshots of a run already: continue that with --resume"),
    ],
)
def test_what_cannot_be_resumed_is_said_in_one_sentence(words, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    (tmp_path / "run" / "snapshots" / "7").touch()
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    assert run(*words, SCRIPTS / "tells.py", tmp_path) == 2
    error = capfd.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "0.json").exists()

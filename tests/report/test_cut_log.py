"""A run that was killed, or is still going, is reported as far as it got, whatever its files end with."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_log import write_log

from evenstep.cli.main import main
from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.report.live import LiveRun, live_table
from evenstep.report.overview import overview_of, values_of
from evenstep.report.page.plots import plots_of, plots_together
from evenstep.report.recorded import read_run
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import JsonlRecorder, RunTail, read_events
from evenstep.telemetry.events import Ended

pytestmark = pytest.mark.xdist_group("cut_log")

PARTS = ((0.001, 0.02, 0.001), (0.001, 0.03, 0.001), (0.001, 0.05, 0.001))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_log(tmp_path_factory.mktemp("whole"), PARTS, notes=True)
    return [(folder / f"worker-{worker}.jsonl").read_bytes() for worker in range(3)]


@settings(max_examples=60)
@given(data=st.data())
def test_cut_off_at_any_byte_it_still_reports(data, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    lines = 0
    for worker, content in enumerate(whole):
        cut = data.draw(st.integers(0, len(content)))
        (folder / f"worker-{worker}.jsonl").write_bytes(content[:cut])
        lines += content[:cut].rpartition(b"\n")[0].count(b'"event":"iteration"')
    live = LiveRun()
    for event in RunTail(folder).new():
        live.take(event, 0.0)
    view = live.view(0.0)
    if not lines:
        assert view is None
        with pytest.raises(ConfigError, match="no worker has finished an iteration yet"):
            read_run(folder)
        return
    overview = overview_of("cut", read_run(folder))
    assert view.samples == sum(each["samples"] for each in values_of(overview)["workers"])
    assert len(plots_of(overview)) >= 4


def test_a_worker_that_starts_again_does_not_go_on_in_the_middle_of_a_torn_line(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text('{"worker":0,"event":"end","at":1.0}\n{"worker":0,"ev')
    recorder = JsonlRecorder(tmp_path, 0)
    recorder.record(Ended(worker=0, at=2.0))
    recorder.close()
    assert list(read_events(tmp_path)) == [Ended(worker=0, at=1.0), Ended(worker=0, at=2.0)]


@pytest.mark.parametrize("torn", ["", '{"wor', "x" * 200_000])
def test_only_what_is_torn_is_taken_away(torn, tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text('{"worker":0,"event":"run"}\n' * 3 + torn)
    JsonlRecorder(tmp_path, 0).close()
    assert file.read_text() == '{"worker":0,"event":"run"}\n' * 3


JUNK = {
    "bytes that are no text": b"\xff\xfe\x00\x80\n",
    "no object": b"[1, 2]\n",
    "no event": b'{"worker":0}\n',
    "an event that is no text": b'{"event":["run"]}\n',
    "nested without end": b"[" * 100_000 + b"\n",
    "a text for a number": b'{"event":"iteration","worker":0,"iteration":1,"at":1.0,"samples":"many",'
    b'"iteration_seconds":1,"input_seconds":0,"compute_seconds":1,"wait_seconds":0,"comm_seconds":0}\n',
    "not a number": b'{"event":"note","worker":0,"iteration":1,"at":1.0,"samples":1,"values":{"loss":NaN}}\n',
    "infinity": b'{"event":"end","worker":0,"at":1e999}\n',
    "negative seconds": b'{"event":"tally","at":1,"version":1,"seconds":-1,"commits":1,"bytes":1,"samples":1}\n',
    "400 digits": b'{"event":"plan","worker":0,"batch_sizes":[%b]}\n' % (b"9" * 400),
    "5000 digits": b'{"event":"plan","worker":0,"batch_sizes":[%b]}\n' % (b"9" * 5000),
    "a path for a worker": b'{"event":"end","worker":"../../0","at":1.0}\n',
    "a line of 17 MB": b" " * (17 << 20) + b'{"event":"end","worker":0,"at":1.0}\n',
}


def looked_at(folder, capsys):
    """What report, top and export say of a run directory that they refuse."""
    for command in (
        ["report", "--json"],
        ["top"],
        ["top", "--json"],
        ["export", "--trace", str(folder / "trace.json")],
    ):
        assert main([*command, str(folder)]) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        yield error


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_one_sentence_and_passed_over_where_a_run_is_followed(junk, whole, tmp_path, capsys):
    for worker, content in enumerate(whole):
        (tmp_path / f"worker-{worker}.jsonl").write_bytes(content + JUNK[junk] * (worker == 1))
    (tmp_path / "worker-abc.jsonl").write_bytes(JUNK[junk])  # Not one of ours.
    assert main(["report", str(tmp_path), "--json"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("evenstep: ")
    assert "delete" in error
    assert main(["top", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 0


def test_what_is_not_there_or_cannot_be_read_is_one_sentence(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "worker-0.jsonl").mkdir(parents=True)
    for folder, fragment in (
        ("empty", "holds no worker-*.jsonl"),
        ("folder", "it is not a regular file"),
        ("x", "there is no folder"),
    ):
        assert main(["report", str(tmp_path / folder)]) == 2
        assert fragment in capsys.readouterr().err


def test_a_pipe_or_a_device_in_a_run_directory_is_one_sentence(whole, tmp_path, capsys):
    (tmp_path / "worker-0.jsonl").write_bytes(whole[0])
    other = tmp_path / "worker-1.jsonl"
    for make in (os.mkfifo, partial(os.symlink, "/dev/zero"), os.mkdir):
        make(other)
        for error in looked_at(tmp_path, capsys):
            assert error.endswith(f"{other} cannot be read (it is not a regular file): delete it, or let it be read")
        other.rmdir() if other.is_dir() else other.unlink()


LIMITED = """
import resource, sys
from evenstep.cli.main import main
from evenstep.telemetry import RunTail

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = [main([command, sys.argv[1], *more]) for command, *more in (["report", "--json"], ["top", "--json"])]
print(codes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_line_of_300_megabytes_takes_little_memory(whole, tmp_path):
    for worker, content in enumerate(whole):
        (tmp_path / f"worker-{worker}.jsonl").write_bytes(content)
    with (tmp_path / "worker-1.jsonl").open("rb+") as file:
        file.seek(300 << 20, os.SEEK_END)
        file.write(b"\n")
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert "is not an event (it is longer than 16 MB)" in done.stderr
    codes, _, megabytes = done.stdout.splitlines()[-1].rpartition(" ")
    assert codes == "[2, 0]"
    assert int(megabytes) < 150


WRONG = [-1, -0.5, 0, 0.5, 1e-300, 2**31, 2**62, 10**400, "x", "", None, True, [], {}, [[1]], ["a"], {"a": "b"}]


class Events(dict):
    """What stands in each file of a run directory."""

    def __repr__(self):  # Hypothesis shows it with each failure.
        return f"<events of {len(self)} files>"


@pytest.fixture(scope="module", params=["collective", "grouped"])
def events(request, whole, tmp_path_factory):
    """Each file of a run with its events."""
    if request.param == "collective":
        return Events(
            (f"worker-{worker}.jsonl", list(map(json.loads, lines.splitlines()))) for worker, lines in enumerate(whole)
        )
    folder = tmp_path_factory.mktemp("simulated")
    cluster = parse_cluster('[devices.d]\nper_sample = "1 ms"\n[[workers]]\ndevice = "d"\ncount = 3')
    scenario = Scenario(
        cluster=cluster, scheme=parse_scheme("grouped:groups=2"), global_batch_size=30, iterations=20,
        epoch_samples=300, message_bytes=0,
    )  # fmt: skip
    log = Log(
        workers=[JsonlRecorder(folder, worker) for worker in range(3)], server=JsonlRecorder(folder, 0, role="server")
    )
    simulate(scenario, log=log)
    log.close()
    return Events((path.name, list(map(json.loads, path.read_text().splitlines()))) for path in folder.iterdir())


def test_workers_without_an_iteration_in_common_are_one_sentence(whole, tmp_path, capsys):
    first, *others = whole
    (tmp_path / "worker-0.jsonl").write_bytes(first.replace(b'"iteration":0,', b'"iteration":2147483648,'))
    for worker, content in enumerate(others, start=1):
        (tmp_path / f"worker-{worker}.jsonl").write_bytes(content)
    assert main(["report", str(tmp_path), "--json"]) == 2
    assert "no iteration stands in the files of all workers" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) in {0, 2}


@settings(max_examples=60)
@given(places=st.tuples(*[st.integers(0, 10**6)] * 4))
def test_a_wrong_value_anywhere_is_one_sentence_or_a_report(places, events, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    kinds = sorted({(name, event["event"]) for name, its in events.items() for event in its})
    damaged, kind = kinds[places[0] % len(kinds)]
    numbers = [number for number, event in enumerate(events[damaged]) if event["event"] == kind]
    at = numbers[places[1] % len(numbers)]
    field = sorted(events[damaged][at])[places[2] % len(events[damaged][at])]
    wrong = {**events[damaged][at], field: WRONG[places[3] % len(WRONG)]}
    for name, its in events.items():
        told = [wrong if (name, number) == (damaged, at) else event for number, event in enumerate(its)]
        (folder / name).write_text("".join(f"{json.dumps(event)}\n" for event in told))
    with suppress(ConfigError):
        overview = overview_of("damaged", read_run(folder))
        json.dumps(values_of(overview), allow_nan=False)
        plots_together([overview]), plots_of(overview)
    live = LiveRun()
    for event in RunTail(folder).new():
        live.take(event, 0.0)
    view = live.view(0.0)
    if view is not None:
        live_table(view, title="damaged", width=100, height=40)
    with suppress(ConfigError):
        assert main(["export", str(folder), "--trace", str(folder / "trace.json")]) == 0
        json.loads((folder / "trace.json").read_text())


def test_a_folder_without_some_workers_files_says_whose_figures_these_are(tmp_path, capsys):
    write_log(tmp_path, PARTS)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert "has no iterations" not in capsys.readouterr().err
    (tmp_path / "worker-1.jsonl").unlink()
    assert main(["report", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert "has no iterations of 1 of its workers: all figures are those of the others" in printed.err.replace(
        "\n", " "
    )
    assert json.loads(printed.out)[0]["unrecorded_workers"] == 1

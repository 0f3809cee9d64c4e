"""A run that was killed, or is still going, is reported as far as it got, whatever its files end with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_log import write_log

from evenstep.cli.main import main
from evenstep.core.errors import ConfigError
from evenstep.report.live import LiveRun
from evenstep.report.overview import overview_of, values_of
from evenstep.report.page.html import all_plots
from evenstep.report.recorded import read_run
from evenstep.telemetry import JsonlRecorder, RunTail, read_events

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
    for role, event in RunTail(folder).new():
        live.take(role, event, 0.0)
    view = live.view(0.0)
    if not lines:
        assert view is None
        with pytest.raises(ConfigError, match="no worker has finished an iteration yet"):
            read_run(folder)
        return
    overview = overview_of("cut", read_run(folder))
    assert view.samples == sum(each["samples"] for each in values_of(overview)["workers"])
    assert len(all_plots([overview])) >= 4


def test_a_worker_that_starts_again_does_not_go_on_in_the_middle_of_a_torn_line(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text('{"worker":0,"event":"run"}\n{"worker":0,"ev')
    recorder = JsonlRecorder(tmp_path, 0)
    recorder.record({"event": "again"})
    recorder.close()
    assert [event["event"] for event in read_events(tmp_path)] == ["run", "again"]


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
}


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
    for folder, fragment in (("empty", "holds no worker-*.jsonl"), ("folder", "cannot be read"), ("x", "holds no")):
        assert main(["report", str(tmp_path / folder)]) == 2
        assert fragment in capsys.readouterr().err

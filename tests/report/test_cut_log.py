"""A run that was killed, or is still going, is reported as far as it got, whatever its files end with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_log import write_log

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

"""Reports of runs on servers, from small logs made by hand and from a real run."""

import json

import pytest
from support.records import run_from

from evenstep.cli.main import main
from evenstep.core.errors import ConfigError
from evenstep.report.overview import overview_of
from evenstep.report.page.tables import runs_table, workers_table
from evenstep.report.recorded import Leave, read_run
from evenstep.report.summary import PushSummary, summarise, summary_of
from evenstep.report.terminal import comparison_table
from evenstep.telemetry import read_events
from evenstep.telemetry.events import Left

COMPUTE, HELD = (0.010, 0.040), (0.030, 0.0)
ITERATIONS = (8, 4)
"""Worker 0 is four times as fast, and took twice as many iterations, since it was held for some time."""

SERVER_EVENTS = [
    {"server": 0, "event": "join", "at": 10.0, "version": -1, "worker": 0, "incarnation": 1},
    {"server": 0, "event": "join", "at": 10.5, "version": -1, "worker": 1, "incarnation": 2},
    {"event": "tally", "at": 11.0, "version": 8, "seconds": 1.0, "commits": 8, "bytes": 8000, "samples": 80},
    {"server": 0, "event": "snapshot", "at": 11.0, "version": 8},
    {"server": 0, "event": "leave", "at": 11.5, "version": 10, "worker": 1, "why": "was silent for too long"},
    {"event": "tally", "at": 12.0, "version": 12, "seconds": 1.5, "commits": 4, "bytes": 4000, "samples": 120},
    {"server": 0, "event": "leave", "at": 12.5, "version": 12, "worker": 0, "why": "is done"},
]


def started(worker, **more):
    about = {"event": "run", "worker": worker, "scheme": "ssp", "engine": "server"}
    return {**about, "global_batch_size": 20, "iterations_per_epoch": 6, **more}


def iteration(worker, number, **told):
    return {
        "event": "iteration",
        "worker": worker,
        "iteration": number,
        "at": number * (COMPUTE[worker] + HELD[worker] + 0.002),
        "samples": 10,
        "iteration_seconds": COMPUTE[worker] + HELD[worker] + 0.002,
        "input_seconds": 0.001,
        "compute_seconds": COMPUTE[worker],
        "wait_seconds": HELD[worker],
        "comm_seconds": 0.001,
        **told,
    }


def events():
    for worker, iterations in enumerate(ITERATIONS):
        yield started(worker)
        yield {"event": "plan", "worker": worker, "batch_sizes": [10, 10]}
        for number in range(iterations):
            yield iteration(worker, number, staleness=number, behind=number / 2, lead=4 if worker == 0 else 0)


@pytest.fixture
def run_dir(tmp_path):
    for worker in range(2):
        write(tmp_path / f"worker-{worker}.jsonl", [event for event in events() if event["worker"] == worker])
    write(tmp_path / "server-0.jsonl", SERVER_EVENTS)
    write(tmp_path / "server-1.jsonl", [])
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def test_all_iterations_of_all_workers_count(run_dir):
    summary = summarise(run_dir)
    fast, slow = summary.workers
    assert [(each.iterations, each.samples) for each in (fast, slow)] == [(8, 80), (4, 40)]
    assert summary.iterations == 8
    assert summary.training_seconds == pytest.approx(8 * 0.042)
    assert summary.samples_per_second == pytest.approx(120 / (8 * 0.042))
    assert (fast.compute_seconds, slow.compute_seconds) == pytest.approx((0.010, 0.040))
    assert (fast.wait_seconds, slow.wait_seconds) == pytest.approx((0.030, 0.0))
    assert (fast.waiting_share, slow.waiting_share) == pytest.approx((30 / 42, 0.0))


def test_staleness_lead_and_time_held_of_each_worker(run_dir):
    fast, slow = summarise(run_dir).workers
    assert fast.pushes == PushSummary(
        committed=8,
        mean_staleness=3.5,
        largest_staleness=7,
        mean_behind=1.75,
        largest_behind=3.5,
        largest_lead=4,
    )
    assert fast.wait_seconds == pytest.approx(0.030)
    assert (slow.worker, slow.pushes.largest_staleness, slow.pushes.largest_lead, slow.wait_seconds) == (1, 3, 0, 0)


def test_what_the_servers_did(run_dir):
    served = summarise(run_dir).served
    assert (served.commits, served.samples_committed, served.joins) == (12, 120, 2)
    assert served.commits_per_second == pytest.approx(12 / (8 * 0.042))
    assert served.bytes_per_second == pytest.approx(12000 / (8 * 0.042))
    assert served.leaves == (Leave(worker=1, why="was silent for too long"), Leave(worker=0, why="is done"))


def test_a_push_of_which_nothing_was_committed_has_no_staleness():
    skipped = iteration(0, 1, lead=1, bound=3)
    run = run_from([*events(), started(0), skipped])
    (fast, _) = summary_of(run).workers
    assert (len(run.iterations[0]), fast.pushes.committed, fast.pushes.largest_lead) == (9, 8, 4)


def test_only_skipped_pushes_are_summed_up_too():
    (worker,) = summary_of(
        run_from([started(0), {"event": "plan", "worker": 0, "batch_sizes": [10]}, iteration(0, 0)])
    ).workers
    assert (worker.pushes.committed, worker.pushes.mean_staleness, worker.pushes.largest_lead) == (0, 0, 0)


def test_a_worker_that_was_started_again_goes_on_with_the_same_run():
    again = [started(1), iteration(1, 0, staleness=1, behind=0.5, lead=0)]
    assert summary_of(run_from([*events(), *again])).workers[1].iterations == 5


def test_a_worker_that_died_before_it_was_told_sizes_is_left_out():
    run = run_from([started(0), *(event for event in events() if event["worker"] == 1)])
    assert [each.worker for each in summary_of(run).workers] == [1]


def test_a_run_without_the_servers_events_is_summed_up_all_the_same(run_dir):
    (run_dir / "server-0.jsonl").unlink()
    summary = summarise(run_dir)
    served = summary.served
    assert (served.commits, served.commits_per_second, served.joins, served.leaves) == (0, 0, 0, ())
    assert summary.workers[0].pushes.largest_staleness == 7


def test_a_run_without_servers_has_no_such_summary(events_of):
    run = run_from(events_of("bsp", (12, 12, 12)), SERVER_EVENTS)
    assert run.servers is None
    assert summary_of(run).served is None


def test_events_of_servers_are_read_by_their_role(run_dir):
    assert [event.kind for event in read_events(run_dir, role="server", kind=Left)] == ["leave", "leave"]
    assert len(list(read_events(run_dir, role="server"))) == len(SERVER_EVENTS)
    assert {event.kind for event in read_events(run_dir)} == {"run", "plan", "iteration"}


def test_where_no_server_wrote_there_are_none(tmp_path):
    (tmp_path / "worker-0.jsonl").write_text("")
    assert list(read_events(tmp_path, role="server")) == []


def test_a_damaged_line_of_a_server_is_named(run_dir):
    (run_dir / "server-0.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"server-0\.jsonl line 1 is not an event"):
        read_run(run_dir)


def test_an_event_of_another_version_is_named(run_dir):
    (run_dir / "server-0.jsonl").write_text('{"event":"tally","at":1.0,"version":1,"seconds":1.0}\n')
    with pytest.raises(ConfigError, match="has no 'commits': it was written by another version"):
        read_run(run_dir)


def test_tables_say_more_of_a_run_that_had_servers(run_dir, events_of, text_of):
    served = overview_of("served", read_run(run_dir))
    without = overview_of("without", run_from(events_of("bsp", (12, 12, 12))))
    lines = text_of(comparison_table([without.summary, served.summary])).splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines if line.strip()}
    assert rows["average iteration"] == ["54", "ms", "42", "42", "ms"]
    shown = runs_table([without, served]).rows[1]
    assert (shown["commits/s"], shown["gradients pushed"], shown["workers came / went"]) == ("36", "0.0 MB/s", "2 / 2")
    fast, slow = workers_table(served).rows
    assert [fast["iterations"], slow["iterations"]] == ["8", "4"]
    assert [fast["largest lead"], slow["largest lead"]] == ["4", "0"]
    assert [fast["average staleness"], slow["average staleness"]] == ["3.5", "1.5"]
    assert [fast["largest staleness"], slow["largest staleness"]] == ["7", "3"]
    assert [fast["largest behind, batches"], slow["largest behind, batches"]] == ["3.5", "1.5"]
    assert "commits/s" not in runs_table([without]).headings
    assert "largest lead" not in workers_table(without).headings


@pytest.mark.multiprocess
def test_a_real_run_is_summed_up_as_json(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["--workers", "2", "--scheme", "ssp:bound=1", "--run-dir", str(tmp_path / "run"), "--json"]
    assert main(["run", *arguments, str(script)]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["scheme"] == "ssp:bound=1"
    assert sum(worker["samples"] for worker in summary["workers"]) == 2 * 96
    served = summary["served"]
    assert served["samples_committed"] == 2 * 96
    assert served["commits"] == sum(worker["iterations"] for worker in summary["workers"])
    assert served["commits"] / served["commits_per_second"] == pytest.approx(summary["training_seconds"])
    assert served["samples_committed"] / summary["samples_per_second"] == pytest.approx(summary["training_seconds"])
    assert served["joins"] == len(served["leaves"]) == 2
    assert all(worker["pushes"]["largest_lead"] <= 2 for worker in summary["workers"])
    assert served["bytes_per_second"] > 0


SCRIPT = """
import support.lean_torch, torch
import evenstep

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

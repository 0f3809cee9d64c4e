"""Workers that hang, stop, are cut off or never come: the others end in time, and say which worker it was."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import faults
from support.hosts import enter, ip, two_hosts
from support.processes import run_workers
from support.started import Started, ended, evenstep, script
from support.training import Run

from evenstep.launch.launch_settings import LaunchSettings

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("lost_workers")]

SCRIPT = Path(faults.__file__).with_name("meets_fault.py")
RUN = Run(scheme="bsp", options={"timeout": 10.0})
LOCAL = replace(RUN, scheme="local-sgd:period=4")

HUNG = {
    "before prepare": "worker 2 has not come to prepare within 10 s: look at its output, then start again",
    "before the step": r"worker 2 has been outside the loader for \d+ s, in iteration 6, while the others waited",
    "after the step": r"worker 2 has been outside the loader for \d+ s, after iteration 6, while the others waited",
    "in the dataset": r"worker 2 has been waiting for the data of iteration 7 for \d+ s, while the others waited",
    "after the loop": r"worker 2 has been outside the loop for \d+ s, after iteration 5, while the others waited",
    "between averages": r"worker 2 has been outside the loader for \d+ s, after iteration 5, while the others waited",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """What became of each group of workers; all that waits for a timeout takes place at the same time."""
    outputs = {ranks: tmp_path_factory.mktemp("output") for ranks in ((0, 1), (1, 2))}
    with ThreadPoolExecutor(16) as pool:
        started = {
            **{moment: pool.submit(faults.run_hung, RUN, 2, moment, 7) for moment in list(HUNG)[:-1]},
            "between averages": pool.submit(faults.run_hung, LOCAL, 2, "after the step", 6),
            **{own: pool.submit(run_workers, faults.die_in_the_second_batch, 3, RUN, 2, own) for own in (False, True)},
            "killed in prepare": pool.submit(run_workers, faults.die_in_prepare, 3, RUN, 2),
            "keeper stopped": pool.submit(faults.run_signalled, RUN, 0, 7, "SIGSTOP"),
            "keeper killed": pool.submit(faults.run_signalled, RUN, 0, 7, "SIGKILL"),
            **{ranks: pool.submit(faults.run_incomplete, RUN, ranks, 3, outputs[ranks]) for ranks in outputs},
        }
    return {"output": outputs, **{case: future.result() for case, future in started.items()}}


@pytest.mark.parametrize("case", HUNG)
def test_a_worker_that_hangs_is_named_with_what_it_was_last_seen_doing(cases, case):
    for outcome in cases[case][:2]:
        assert re.match(f"WorkerLostError: {HUNG[case]}", outcome.error), outcome.error
    # It neither ended nor failed: it was killed when the others had ended.
    assert (cases[case][2].value, cases[case][2].error, cases[case][2].exitcode) == (None, None, None)


def test_a_worker_that_dies_in_prepare_is_named(cases):
    assert cases["killed in prepare"][2].exitcode == -signal.SIGKILL
    for outcome in cases["killed in prepare"][:2]:
        assert outcome.error.startswith("WorkerLostError: worker 2 ended, died, stopped or did not answer within 10 s")


@pytest.mark.parametrize("own", [False, True])
def test_a_worker_that_dies_before_others_reorder_their_buckets_is_named(cases, own):
    for outcome in cases[own][:2]:
        for kind, said, cause in outcome.value:
            assert kind == "WorkerLostError"
            assert said.startswith("worker 2 ended, died, stopped or did not answer within 10 s")
            assert ".cc:" in cause
        assert len(outcome.value) == 2 - own


def test_the_worker_that_keeps_the_store_is_named_where_it_is_stopped(cases):
    for outcome in cases["keeper stopped"][1:]:
        assert re.match(
            r"WorkerLostError: worker 0, which keeps the rendezvous store at 127.0.0.1:\d+, is stopped or cannot be",
            outcome.error,
        ), outcome.error


def test_the_worker_that_kept_the_store_is_not_blamed_where_nothing_tells_who_failed_first(cases):
    outcomes = cases["keeper killed"]
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.error.startswith("WorkerLostError: worker 0, which keeps the rendezvous store")
        assert "is gone, and which worker failed first cannot be told any more" in outcome.error


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ((0, 1), "worker 2 has not come to prepare within 10 s: look at its output, then start again"),
        ((1, 2), "worker 0, which keeps the rendezvous store at 127.0.0.1:"),
    ],
    ids=["worker 2", "worker 0"],
)
def test_a_worker_that_never_starts_is_named_without_a_word_of_c10ds(cases, ranks, sentence):
    for rank, outcome in zip(ranks, cases[ranks], strict=True):
        assert outcome.error.startswith(f"WorkerLostError: {sentence}")
        printed = (cases["output"][ranks] / str(rank)).read_text()
        assert sentence in printed.splitlines()[-1]
        assert re.search("c10d|DistStoreError|DistNetworkError", printed) is None


def on_host(host, path, *words):
    """The script on this host, or on the test's own."""
    if host is not None:
        enter(host)
    script(path, *words)


def started(place, fault, timeout, hosts=(None, None), scheme="bsp"):
    """Two workers, of which worker 0 meets this fault in iteration 7."""
    words = (SCRIPT, 0, 7, fault, scheme, timeout)
    for rank, host in enumerate(hosts):
        environment = {**place, "WORLD_SIZE": "2", "RANK": str(rank)}
        if host is not None:
            environment["GLOO_SOCKET_IFNAME"] = host[1]
        yield Started(on_host, host, *words, environment=environment)


def test_a_worker_that_keeps_the_store_says_what_it_failed_of_before_it_ends():
    _, said = ended(list(started(faults.meeting_place(), "error", 60)))
    assert "ValueError: boom" in said[0]
    assert "WorkerLostError: worker 0 ended with ValueError: boom: look at its output" in said[1]


def test_a_data_worker_that_is_killed_is_named_and_no_other_worker():
    codes, said = ended(list(started(faults.meeting_place(), "data worker", 60)))
    assert codes == [1, 1]
    for each in said:
        assert "WorkerLostError: a data worker of worker 0 was killed, as a system does that is out of memory" in each


def test_a_run_starts_again_where_its_first_worker_was_stopped():
    with Started(evenstep, "run", "--workers", 2, "--max-restarts", 1, SCRIPT, 0, 7, "SIGSTOP", "bsp", 10) as launcher:
        printed, said = launcher.communicate()
    assert launcher.returncode == 0, said
    assert set(printed.splitlines()) == {"worker 0 meets SIGSTOP", "worker 0 finished", "worker 1 finished"}
    lost = "worker 0 ended, died, stopped or did not answer within 10 s"
    assert f"WorkerLostError: {lost}" in said
    assert f"evenstep: worker 1 ended with exit code 1: {lost}" in said
    assert "; all workers start again (1 of 1)\n" in said


def test_a_stopped_worker_is_named_long_before_the_timeout_and_the_run_starts_again():
    words = ("run", "--workers", 2, "--heartbeat", 2, "--max-restarts", 1, SCRIPT, 1, 7, "SIGSTOP", "lb-bsp", 6000)
    with Started(evenstep, *words) as launcher:
        printed, said = launcher.communicate()
    assert launcher.returncode == 0, said
    assert set(printed.splitlines()) == {"worker 1 meets SIGSTOP", "worker 0 finished", "worker 1 finished"}
    assert "WorkerLostError: worker 1 stood still for 2 s, stopped by a signal such as SIGSTOP" in said
    assert re.search(
        r"evenstep: worker 0 ended with exit code 1: worker 1 stood still .* start again \(1 of 1\)\n", said
    )


@pytest.mark.parametrize("scheme", ["bsp", "local-sgd:period=4"])
def test_a_stopped_worker_that_keeps_the_store_is_named_by_workers_on_its_machine(scheme):
    place = {**faults.meeting_place(), **LaunchSettings(heartbeat_seconds=2.0).to_environment()}
    first, second = started(place, "SIGSTOP", 6000, scheme=scheme)
    with first, second:
        _, said = second.communicate()
    assert second.returncode == 1
    assert "WorkerLostError: worker 0 stood still for 2 s, stopped by a signal such as SIGSTOP" in said


@pytest.mark.netns
def test_both_sides_of_a_cable_that_is_cut_end_and_name_the_other():
    with two_hosts() as hosts:
        place = {"MASTER_ADDR": hosts[0][2], "MASTER_PORT": "29400"}
        processes = list(started(place, "cut", 10, hosts))
        assert processes[0].stdout.readline() == "worker 0 meets cut\n"
        ip("-n", hosts[1][0], "link", "set", hosts[1][1], "down")
        codes, said = ended(processes)
    assert codes == [1, 1]
    assert "WorkerLostError: worker 1 ended, died, stopped or did not answer within 10 s" in said[0]
    name = f"worker 0, which keeps the rendezvous store at {hosts[0][2]}:29400, is stopped or cannot be reached"
    assert f"WorkerLostError: {name}" in said[1]

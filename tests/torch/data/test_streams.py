"""Each worker draws from data of its own, as many samples as its size says: streams, and private datasets."""

import numpy as np
import pytest
from support import streams
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run

pytestmark = pytest.mark.multiprocess

COUNTS = (61, 25, 38)


def of_one_process(run, values, counts=COUNTS):
    expected = streams.train_alone(run, counts, [value["seen"] for value in values])
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["tuples", "dicts", "map"])
@pytest.mark.parametrize("processes", [0, 2])
def test_each_step_is_the_one_of_a_single_process_on_the_union(kind, processes):
    run = Run(scripted=11, batch_size=4, epochs=2, num_workers=processes, options={"partition": "private"})
    values = results(run_workers(streams.train, 3, run, kind, COUNTS, {}))
    for count, value in zip(COUNTS, values, strict=True):
        for epoch in value["seen"]:
            assert sorted(number for batch in epoch for number in batch) == list(range(count))
        assert value["seen"][0] != value["seen"][1]
    of_one_process(run, values)


@pytest.mark.parametrize("scheme", ["bsp", "lb-bsp", "dbs", None])
def test_schemes_with_a_barrier_take_streams_without_partition(scheme):
    run = Run(scheme=scheme, batch_size=3, epochs=2)
    if scheme is None:
        run.options = {"batch_sizes": [2, 2, 6]}
    values = results(run_workers(streams.train, 3, run, "tuples", COUNTS, {}))
    assert values[0]["sizes"][0] == (run.options.get("batch_sizes") or [3, 3, 3])
    of_one_process(run, values)


def test_sizes_follow_speeds():
    run = Run(scheme=told("lb-bsp", [4, 4, 1]), batch_size=8)
    value, *_ = results(run_workers(streams.train, 3, run, "tuples", (200, 200, 800), {}))
    assert value["sizes"][0] == [8, 8, 8]
    assert value["sizes"][10] == [4, 4, 16]


def test_an_epoch_goes_on_without_those_who_have_no_samples_left_or_stops():
    run = Run(scheme="bsp", batch_size=4, epochs=1)
    on, *_ = results(run_workers(streams.train, 3, run, "tuples", (18, 5, 8), {}))
    assert on["sizes"] == [[4, 4, 4], [4, 1, 4], [4, 0, 0], [4, 0, 0], [2, 0, 0]]
    run.options = {"uneven": "stop"}
    values = results(run_workers(streams.train, 3, run, "tuples", (18, 5, 8), {}))
    assert values[0]["sizes"] == [[4, 4, 4], [4, 1, 4]]
    of_one_process(run, values, (18, 5, 8))


def test_workers_meet_only_where_their_reports_do_not_say_enough():
    run = Run(scheme="bsp", batch_size=4, epochs=2)
    values = results(run_workers(streams.count_meetings, 3, run, (400, 400, 400)))
    assert values == [{"iterations": 200, "meetings": 2}] * 3


@pytest.mark.parametrize(
    ("stop", "kind", "processes"),
    [(4, "tuples", 0), (4, "dicts", 2), (4, "map", 0), (4, "map", 2), (15, "tuples", 0), (15, "map", 2)],
)
def test_a_run_resumes_in_mid_epoch(stop, kind, processes):
    # By the fifteenth iteration of 16, workers 1 and 2 have none left.
    run = Run(scheme="bsp", batch_size=4, epochs=2, num_workers=processes, options={"partition": "private"})
    whole = results(run_workers(streams.train, 3, run, kind, COUNTS, {"stop": stop}))
    state = whole[1]["state"]  # The state of any worker serves all.
    resumed = results(run_workers(streams.train, 3, run, kind, COUNTS, {"state": state}))
    for before, after in zip(whole, resumed, strict=True):
        assert after["seen"] == [before["seen"][0][stop:], before["seen"][1]]
        np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)


def test_a_state_goes_with_its_workers_and_its_data():
    for case, says in streams.WRONG_STATES:
        for value in results(run_workers(streams.resume_wrongly, 2, case)):
            assert says in value


@pytest.mark.parametrize("case", range(len(streams.REFUSED)))
def test_what_cannot_work_says_so_in_one_sentence(case):
    says = streams.REFUSED[case][2]
    for outcome in run_workers(streams.refused, 2, case):
        assert outcome.error is not None
        assert says in outcome.error
        assert "\n" not in outcome.error


def test_an_error_of_one_worker_s_stream_is_told_to_all():
    own, other = run_workers(streams.fail, 2)
    assert own.error == "OSError: the file is gone"
    assert other.error == "ConfigError: worker 0: OSError: the file is gone"


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_leaves_its_loop_alone_is_named_long_before_the_timeout(late):
    for outcome in run_workers(streams.leave_alone, 3, late):
        assert outcome.error.startswith(
            "WorkerLostError: worker 1 waits to hear what data the others have, which wait for something else: begin"
            " and leave each loop over data of the workers' own on all of them together"
        )


def test_a_stream_that_is_read_again_in_another_order_is_noticed():
    for warned in results(run_workers(streams.resume_in_another_order, 2)):
        assert [len(each) for each in warned] == [0, 1, 0, 0]
        assert warned[1][0].startswith("the loader begins with other samples than when the state was taken; ")


def test_parts_that_begin_alike_may_be_trained_on_by_those_who_say_so():
    assert results(run_workers(streams.begin_alike, 2)) == [4, 4]


def test_a_loader_of_own_data_has_no_length_and_starts_nowhere_else():
    for value in results(run_workers(streams.ask, 2)):
        assert value == ["it depends on the workers' speeds", "give load_state_dict what state_dict returned there"]


def test_a_checkpoint_hands_a_batch_without_a_step_out_again(tmp_path):
    run = Run(scripted=3, batch_size=4, epochs=1)
    before = results(run_workers(streams.train_with_checkpoints, 3, run, COUNTS, str(tmp_path), 4))
    after = results(run_workers(streams.train_with_checkpoints, 3, run, COUNTS, str(tmp_path), None))
    joined = [[*one["seen"], *two["seen"]] for one, two in zip(before, after, strict=True)]
    for count, batches in zip(COUNTS, joined, strict=True):
        assert sorted(number for batch in batches for number in batch) == list(range(count))
    expected = streams.train_alone(run, COUNTS, [[batches] for batches in joined])
    for value in after:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("processes", [0, 2])
def test_scripts_may_look_at_data_fetch_ahead_and_leave_early(processes):
    run = Run(scripted=11, batch_size=4, num_workers=processes)
    values = results(run_workers(streams.loop_as_scripts_do, 3, run, COUNTS))
    assert [value["epoch"] for value in values] == [2, 2, 2]
    for count, value in zip(COUNTS, values, strict=True):
        assert sorted(number for batch in value["seen"][1] for number in batch) == list(range(count))
    of_one_process(run, values)


def test_a_session_has_streams_beside_common_data():
    first, *others = results(run_workers(streams.take_turns, 2, Run(scheme="lb-bsp", batch_size=3)))
    assert first["length"] == 3
    assert [value["weights"] for value in others] == [first["weights"]]

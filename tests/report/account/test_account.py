"""An account is the same however the iterations come, and says what is so in a made-up run."""

import numpy as np
import pytest
from support.made_meetings import meetings_of

from evenstep.report.account.account import Account
from evenstep.report.account.verdict import summary_lines, verdict_of


def meetings(sizes, *, seconds_per_sample=(0.001, 0.001, 0.004), fixed=0.0, noise=None, comm=0.002):
    sizes = np.array(sizes, dtype=np.float64)
    compute = fixed + sizes * np.array(seconds_per_sample)
    if noise is not None:
        compute *= noise.lognormal(0.0, 0.05, compute.shape)
    return meetings_of(sizes, compute, comm=comm)


def a_run(noise=None):
    return meetings([(12, 12, 12)] * 5 + [(16, 16, 4)] * 60 + [(8, 8, 2)] + [(16, 16, 4)] * 63, noise=noise)


def lines_of(account, scheme):
    return summary_lines(account, scheme, verdict_of(account, range(account.workers), scheme))


@pytest.mark.parametrize("step", [1, 7, 64])
def test_iterations_may_come_some_at_a_time(step):
    run = a_run(np.random.default_rng(0))
    at_once, in_pieces = Account(3, 36), Account(3, 36)
    at_once.take(run)
    for start in range(0, len(run.seconds), step):
        in_pieces.take(run.part(slice(start, start + step)))
    one, other = (verdict_of(account, range(3), "lb-bsp") for account in (at_once, in_pieces))
    assert one.text == other.text
    assert one.cost == pytest.approx(other.cost)
    assert str(at_once.gain.speed_up) == str(in_pieces.gain.speed_up)
    assert lines_of(at_once, "lb-bsp") == lines_of(in_pieces, "lb-bsp")


def test_a_run_in_three_lines():
    account = Account(3, 36)
    account.take(a_run())
    assert lines_of(account, "lb-bsp") == [
        "lb-bsp trained 1,870 samples/s for 2.47 s on 3 workers; batch sizes 12 12 12 at first, 16 16 4 at the end.",
        "Training is 2.60 times as fast as with equal sizes (95% interval 2.41 to 2.74): worker 2 computes 4x slower"
        " and gets 4 of 36 samples instead of 12; waiting fell from 48% to 5% of all workers' time.",
    ]


def test_equal_workers_are_told_so():
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 80, seconds_per_sample=(0.001,) * 3))
    assert str(account.gain.speed_up) == "1.00"
    assert lines_of(account, "lb-bsp")[1:] == ["No worker is slow: waiting takes 0% of all workers' time."]


def test_what_slower_sizes_cost_is_said():
    # Sizes that make it worse: the slow worker has more.
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 5 + [(8, 8, 20)] * 40))
    assert verdict_of(account, range(3), "lb-bsp").text.startswith(
        "Training is slower than with equal sizes, 0.64 times as fast"
    )


def test_sums_over_several_iterations_between_two_meetings_are_shown_as_batch_sizes():
    account = Account(3, 36)
    account.take(meetings([(48, 48, 48)] * 5 + [(64, 64, 16)] * 20))
    assert (account.first_sizes, account.last_sizes) == ((12, 12, 12), (16, 16, 4))


def test_an_epoch_that_is_shorter_than_the_global_batch_shows_the_sizes_that_it_had():
    account = Account(3, 36)
    account.take(meetings([(10, 10, 10)]))
    account.take(meetings([(13, 13, 4)] * 2))
    assert (account.first_sizes, account.last_sizes) == ((10, 10, 10), (13, 13, 4))


SLIGHTLY = (0.001, 0.001, 0.0015)


@pytest.mark.parametrize(
    ("scheme", "rest"),
    [
        ("bsp", ", and waiting for it takes 20% of all workers' time; lb-bsp would give it smaller batches."),
        *(
            (
                scheme,
                ", and waiting for it takes 20% of all workers' time; load=lb-bsp would give it smaller batches.",
            )
            for scheme in ("local-sgd", "diloco:period=20")
        ),
        ("diloco:steps=speed", " and gets 12 of 36 samples; waiting for it takes 20% of all workers' time."),
        ("local-sgd:load=lb-bsp", " and gets 12 of 36 samples; waiting for it takes 20% of all workers' time."),
        ("lb-bsp", " and gets 12 of 36 samples; waiting for it takes 20% of all workers' time."),
    ],
)
def test_a_scheme_that_balances_is_not_advised_where_it_leaves_sizes_as_they_are(scheme, rest):
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 60, seconds_per_sample=SLIGHTLY))
    assert verdict_of(account, range(3), scheme).text == f"Worker 2 computes 1.5x slower{rest}"


def test_fewer_samples_are_told_against_an_equal_share_where_the_first_sizes_follow_speed_already():
    account = Account(3, 36)
    account.take(meetings([(60, 60, 24)] * 5 + [(64, 64, 16)] * 60))
    told = verdict_of(account, range(3), "diloco:steps=speed").text
    assert "worker 2 computes 4x slower and gets 4 of 36 samples instead of 12; waiting fell" in told


def test_batches_too_small_to_be_divided_are_to_be_accumulated():
    account = Account(3, 6)
    account.take(meetings([(2, 2, 2)] * 60))
    *_, advice = lines_of(account, "lb-bsp")
    assert advice == (
        "Batches this small are hardly divided by speed: if the script accumulates A of them for a step, give prepare"
        " accumulation=A."
    )


def test_the_gain_is_told_where_communication_takes_more_than_waiting():
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 5 + [(16, 16, 4)] * 400, comm=0.012))
    gained, *communication = lines_of(account, "lb-bsp")[1:]
    assert gained.startswith("Training is 2.11 times as fast as with equal sizes (95% interval 2.0")
    assert communication == [
        "Communication takes 42% of all workers' time, on all alike; waiting for each other takes 1%.",
        "Larger batches, or local-sgd, communicate less often.",
    ]


def test_what_cannot_be_done_while_workers_come_and_go_is_not_advised():
    account = Account(3, 6, elastic=True)
    account.take(meetings([(2, 2, 2)] * 2000, seconds_per_sample=(0.003,) * 3, comm=0.012))
    assert verdict_of(account, range(3), "lb-bsp").text.endswith("Larger batches communicate less often.")


def test_a_run_of_a_few_seconds_is_not_told_to_communicate_less():
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 60, seconds_per_sample=(0.001,) * 3, comm=0.012))
    assert verdict_of(account, range(3), "bsp").text == "No worker is slow: waiting takes 0% of all workers' time."


EVENED_OUT = (0.001, 0.001, 14 / 12000)
"""With 12 samples each as fast as with 14, 14 and 8."""


def test_no_gain_is_told_that_is_within_its_noise():
    account = Account(3, 36)
    noise = np.random.default_rng(1)
    account.take(meetings([(12, 12, 12)] * 5 + [(13, 13, 10)] * 80, seconds_per_sample=EVENED_OUT, noise=noise))
    assert account.gain.speed_up.low < 1.02
    assert verdict_of(account, range(3), "lb-bsp").text.startswith("No worker is slow: waiting takes 6%")


def slowed_by_worker_2(iterations, seconds_per_sample=0.004):
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * iterations, seconds_per_sample=(0.001, 0.001, seconds_per_sample)))
    return account


@pytest.mark.parametrize(
    ("iterations", "said"),
    [
        (1, "1 iteration in 0.05 s; about 9 more iterations would tell."),
        (9, "9 iterations in 0.45 s; about 1 more iteration would tell."),
    ],
)
def test_a_run_of_a_few_iterations_has_no_verdict(iterations, said):
    account = slowed_by_worker_2(iterations)
    verdict = verdict_of(account, range(3), "bsp")
    assert (verdict.worker, verdict.cause, verdict.slowdown) == (None, None, None)
    assert verdict.text == f"Too short for a verdict: {said}"
    assert lines_of(account, "bsp")[1:] == [f"Too short for a verdict: {said}"]
    assert verdict_of(slowed_by_worker_2(10), range(3), "bsp").worker == 2


@pytest.mark.parametrize(
    ("scheme", "iterations", "helps"), [("bsp", 10, True), ("bsp", 9, False), ("lb-bsp", 10, False)]
)
def test_sizes_may_help_a_run_that_had_equal_ones_for_long_enough(scheme, iterations, helps):
    assert verdict_of(slowed_by_worker_2(iterations), range(3), scheme).sizes_may_help is helps


def disturbed(iterations):
    """Each of three workers is ten times slower in an iteration of its own, out of 12."""
    compute = np.full((iterations, 3), 0.010)
    for worker in range(3):
        compute[4 * worker + 3 :: 12, worker] = 0.100
    account = Account(3, 36)
    account.take(meetings_of(np.full((iterations, 3), 12.0), compute))
    return account


def test_a_disturbed_run_has_a_verdict_once_it_is_known_how_long_workers_wait():
    text = verdict_of(disturbed(24), range(3), "bsp").text
    assert text == "Too short for a verdict: 24 iterations in 0.828 s; about 20 more iterations would tell."
    assert verdict_of(disturbed(80), range(3), "bsp").text.startswith("Waiting takes 43% of all workers' time")


def test_what_a_longer_account_of_the_run_tells_is_enough_to_judge_its_latest_iterations():
    latest, longer = slowed_by_worker_2(5), slowed_by_worker_2(60)
    assert verdict_of(latest, range(3), "bsp", longer=longer).worker == 2

"""An account is the same however the iterations come, and says what is so in a made-up run."""

import numpy as np
import pytest

from evenstep.report.account import Account, Meetings, summary_lines, verdict_of

COMM = 0.002


def meetings(sizes, bases, *, seconds_per_sample=(0.001, 0.001, 0.004), fixed=0.0, noise=None, comm=COMM):
    samples = np.array(sizes, dtype=np.float64).T
    compute = fixed + samples * np.array(seconds_per_sample)[:, np.newaxis]
    if noise is not None:
        compute *= noise.lognormal(0.0, 0.05, compute.shape)
    wait = compute.max(axis=0) - compute
    return Meetings(
        samples=samples,
        own=np.stack([compute, np.zeros_like(compute), np.zeros_like(compute)]),
        wait=wait,
        comm=np.full_like(wait, comm),
        seconds=compute.max(axis=0) + comm,
        bases=tuple(bases),
    )


def some(taken, stretch):
    return Meetings(
        samples=taken.samples[:, stretch],
        own=taken.own[:, :, stretch],
        wait=taken.wait[:, stretch],
        comm=taken.comm[:, stretch],
        seconds=taken.seconds[stretch],
        bases=taken.bases[stretch],
    )


def a_run(noise=None):
    sizes = [(12, 12, 12)] * 5 + [(16, 16, 4)] * 60 + [(8, 8, 2)] + [(12, 12, 12)] * 3 + [(16, 16, 4)] * 60
    bases = ["start"] * 5 + ["speed"] * 61 + ["comparison"] * 3 + ["speed"] * 60
    return meetings(sizes, bases, noise=noise)


@pytest.mark.parametrize("step", [1, 7, 64])
def test_iterations_may_come_some_at_a_time(step):
    run = a_run(np.random.default_rng(0))
    at_once, in_pieces = Account(3, 36), Account(3, 36)
    at_once.take(run)
    for start in range(0, len(run.seconds), step):
        in_pieces.take(some(run, slice(start, start + step)))
    one, other = (verdict_of(account, range(3), "lb-bsp") for account in (at_once, in_pieces))
    assert one.text == other.text
    assert one.cost == pytest.approx(other.cost)
    assert str(at_once.speed_up) == str(in_pieces.speed_up)
    assert summary_lines(at_once, "lb-bsp") == summary_lines(in_pieces, "lb-bsp")


def test_a_run_in_three_lines():
    account = Account(3, 36)
    account.take(a_run())
    assert summary_lines(account, "lb-bsp") == [
        "lb-bsp trained 1,800 samples/s for 2.57 s on 3 workers; batch sizes 12 12 12 at first, 16 16 4 at the end.",
        "Training is 2.50 times as fast as with equal sizes: worker 2 computes 4x slower and"
        " gets 4 of 36 samples instead of 12; waiting fell from 48% to 0% of all workers' time.",
    ]


def test_equal_workers_are_told_so():
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 80, ["start"] * 5 + ["speed"] * 75, seconds_per_sample=(0.001,) * 3))
    assert str(account.speed_up) == "1.00"
    assert summary_lines(account, "lb-bsp")[1:] == ["No worker is slow: waiting takes 0% of all workers' time."]


def test_a_run_under_auto_is_told_where_to_ask_for_what_it_does_not_choose():
    account = Account(3, 36)
    account.take(a_run())
    *others, last = summary_lines(account, "auto:multiple=2")
    assert [line.replace("auto:multiple=2", "lb-bsp") for line in others] == summary_lines(account, "lb-bsp")
    assert last == "auto does not choose schemes on servers: evenstep advise RUN_DIR says what they would process."


def test_what_slower_sizes_cost_is_said():
    # Sizes that make it worse: the slow worker has more.
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 5 + [(8, 8, 20)] * 40, ["start"] * 5 + ["speed"] * 40))
    assert verdict_of(account, range(3), "lb-bsp").text.startswith(
        "Training is slower than with equal sizes, 0.64 times as fast"
    )


def test_the_slowness_of_a_worker_is_measured_at_equal_sizes():
    account = Account(3, 36)
    sizes = [(12, 12, 12)] * 5 + [(17, 17, 2)] * 40
    account.take(meetings(sizes, ["start"] * 5 + ["speed"] * 40, fixed=0.030))
    # For a sample of the decided sizes it is (30 + 8) / 2 ms against (30 + 17) / 17 ms: 6.9 times.
    assert account.slowdowns()[2] == pytest.approx((30 + 48) / (30 + 12))


def test_sums_over_several_iterations_between_two_meetings_are_shown_as_batch_sizes():
    account = Account(3, 36)
    account.take(meetings([(48, 48, 48)] * 5 + [(64, 64, 16)] * 20, ["start"] * 5 + ["speed"] * 20))
    assert (account.first_sizes, account.last_sizes) == ((12, 12, 12), (16, 16, 4))


SLIGHTLY = (0.001, 0.001, 0.0015)
EVENED_OUT = (0.001, 0.001, 14 / 12000)
"""With 12 samples each as fast as with 14, 14 and 8."""


@pytest.mark.parametrize(
    ("scheme", "rest"),
    [
        ("bsp", ", and waiting for it takes 20% of all workers' time; lb-bsp would give it smaller batches."),
        (
            "local-sgd",
            ", and waiting for it takes 20% of all workers' time; load=lb-bsp would give it smaller batches.",
        ),
        ("local-sgd:load=lb-bsp", " and gets 12 of 36 samples; waiting for it takes 20% of all workers' time."),
        ("lb-bsp", " and gets 12 of 36 samples; waiting for it takes 20% of all workers' time."),
    ],
)
def test_a_scheme_that_balances_is_not_advised_where_it_leaves_sizes_as_they_are(scheme, rest):
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 60, ["start"] * 5 + ["speed"] * 55, seconds_per_sample=SLIGHTLY))
    assert verdict_of(account, range(3), scheme).text == f"Worker 2 computes 1.5x slower{rest}"


def test_the_gain_is_told_where_communication_takes_more_than_waiting():
    account = Account(3, 36)
    account.take(meetings([(12, 12, 12)] * 5 + [(16, 16, 4)] * 60, ["start"] * 5 + ["speed"] * 60, comm=0.012))
    assert summary_lines(account, "lb-bsp")[1:] == [
        "Training is 1.97 times as fast as with equal sizes.",
        "Communication takes 39% of all workers' time, on all alike; waiting for each other takes 6%.",
        "Larger batches, or local-sgd, communicate less often.",
    ]


def test_a_gain_within_its_noise_is_said_to_be():
    account = Account(3, 36)
    noise = np.random.default_rng(1)
    sizes = [(12, 12, 12)] * 5 + [(14, 14, 8)] * 80
    account.take(meetings(sizes, ["start"] * 5 + ["speed"] * 80, seconds_per_sample=EVENED_OUT, noise=noise))
    assert account.speed_up.low < 1 < account.speed_up.high
    assert ", which may be noise" in verdict_of(account, range(3), "lb-bsp").text


def slowed_by_worker_2(iterations, seconds_per_sample):
    account = Account(3, 36)
    paces = (0.001, 0.001, seconds_per_sample)
    account.take(meetings([(12, 12, 12)] * iterations, ["start"] * iterations, seconds_per_sample=paces))
    return account


@pytest.mark.parametrize(
    ("iterations", "seconds_per_sample", "said"),
    [
        (19, 0.040, "19 iterations in 9.16 s"),
        (60, 0.0012, "60 iterations in 0.984 s"),
        (1, 0.1, "1 iteration in 1.2 s"),
    ],
)
def test_a_short_run_has_no_verdict(iterations, seconds_per_sample, said):
    account = slowed_by_worker_2(iterations, seconds_per_sample)
    verdict = verdict_of(account, range(3), "bsp")
    assert (verdict.worker, verdict.cause, verdict.slowdown) == (None, None, None)
    assert verdict.text == f"Too short for a verdict: {said}."
    assert summary_lines(account, "bsp")[1:] == [verdict.text]


def test_a_run_of_twenty_iterations_and_a_second_has_one():
    assert verdict_of(slowed_by_worker_2(20, 0.0041), range(3), "bsp").worker == 2


def test_what_a_longer_account_of_the_run_tells_is_enough_to_judge_its_latest_iterations():
    latest, longer = slowed_by_worker_2(5, 0.004), slowed_by_worker_2(60, 0.004)
    assert verdict_of(latest, range(3), "bsp", longer=longer).worker == 2

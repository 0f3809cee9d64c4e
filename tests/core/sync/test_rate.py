import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.sync.rate import RATES, commit_options

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4, "nesterov": False, "maximize": False}
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


def displacement(make, options, *, share, commits, staleness=0.0):
    """How far a scalar moves in the last global batch of `commits` on a constant gradient."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight], **options)
    per_batch = round(1 / share)
    for number in range(commits):
        if number == commits - per_batch:
            before = weight.item()
        weight.grad = torch.ones_like(weight)
        optimizer.param_groups[0].update(commit_options(options, share=share, staleness=staleness))
        optimizer.step()
    return before - weight.item()


@pytest.mark.parametrize(
    ("options", "share", "staleness", "rate"),
    [
        ({"lr": 0.1}, 0.25, 0.0, 0.025),
        ({"lr": 0.1}, 0.25, 4.0, 0.025),
        (SGD, 0.25, 0.0, 0.025),
        (SGD, 0.25, 0.5, 0.025 / 5.5),
        (SGD, 0.25, 1.0, 0.0025),
        (SGD | {"nesterov": True}, 0.25, 1.0, 0.0025),
        (SGD | {"dampening": 0.9}, 0.25, 1.0, 0.025),
        (SGD | {"dampening": 0.95}, 0.25, 1.0, 0.025),
        (SGD | {"momentum": 0.0}, 0.0625, 3.0, 0.00625),
        (ADAM, 0.25, 3.0, 0.0025),
        ({"lr": 0.01, "alpha": 0.99, "momentum": 0.5}, 0.5, 1.0, 0.0025),
    ],
)
def test_the_rate_follows_share_and_staleness_and_nothing_else_changes(options, share, staleness, rate):
    new = commit_options(options, share=share, staleness=staleness)
    assert new["lr"] == pytest.approx(rate, rel=1e-12)
    assert new | {"lr": options["lr"]} == options


@pytest.mark.parametrize("options", [SGD, ADAM, {"lr": 1 / 3}])
@pytest.mark.parametrize("rule", RATES)
def test_a_whole_global_batch_that_is_not_stale_keeps_the_options_exactly(options, rule):
    new = commit_options(options, share=1.0, staleness=0.0, rule=rule)
    assert new == options
    assert new is not options


def test_one_worker_that_overlaps_its_exchange_is_stale_by_its_whole_batch():
    new = commit_options({"lr": 0.1, "momentum": 0.9}, share=1.0, staleness=1.0)
    assert new["lr"] == pytest.approx(0.01)


@given(st.floats(0.001, 2.0), st.floats(0.0, 100.0))
def test_raw_keeps_the_options_at_any_share_and_staleness(share, staleness):
    assert commit_options(SGD, share=share, staleness=staleness, rule="raw") == SGD


def test_the_options_that_were_given_stay_as_they_were():
    given_options = dict(SGD)
    commit_options(given_options, share=0.5, staleness=1.0)
    assert given_options == SGD


@given(
    st.floats(0.0, 1.0, exclude_max=True), st.floats(0.001, 0.999), st.floats(0.0, 50.0), st.floats(0.0, 50.0)
)  # fmt: skip
def test_more_staleness_never_raises_the_rate_nor_does_any_exceed_the_share(momentum, share, one, other):
    less, more = sorted((one, other))
    options = SGD | {"momentum": momentum}
    rates = [commit_options(options, share=share, staleness=staleness)["lr"] for staleness in (0.0, less, more)]
    assert 0.1 * share == pytest.approx(rates[0])
    assert rates[0] >= rates[1] >= rates[2] > 0.0


def test_a_momentum_that_forgets_nothing_comes_to_rest_under_staleness():
    options = SGD | {"momentum": 1.0}
    assert commit_options(options, share=0.5, staleness=0.0)["lr"] == 0.05
    assert commit_options(options, share=0.5, staleness=1.0)["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("share", [1 / 4, 1 / 16])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        (torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99)}),
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.9}),
    ],
)
def test_without_staleness_a_global_batch_in_parts_moves_as_far_as_in_one(make, options, share):
    whole = displacement(make, options, share=1.0, commits=200)
    assert displacement(make, options, share=share, commits=256) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_a_staleness_of_one_global_batch_momentum_moves_as_far_as_plain_sgd(nesterov):
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    assert displacement(torch.optim.SGD, options, share=1 / 16, commits=256, staleness=1.0) == pytest.approx(0.1)


def test_an_unknown_rule_is_refused_with_the_rules_there_are():
    with pytest.raises(ConfigError, match="there is no rate 'linear': use one of share, raw"):
        commit_options(SGD, share=0.5, staleness=0.0, rule="linear")

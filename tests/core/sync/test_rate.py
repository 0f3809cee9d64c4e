import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.core.sync.rate import RATES, clip_factor, commit_step, look_ahead

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4, "nesterov": False, "maximize": False}
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


class Weight:
    """A scalar that commits move, as on a server."""

    def __init__(self, make, options):
        self.weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.optimizer = make([self.weight], **options)
        # All that torch has, as a worker sends them.
        unsent = ("params", "foreach", "differentiable", "fused")
        self.options = {name: value for name, value in self.optimizer.param_groups[0].items() if name not in unsent}

    def commit(self, gradient, **about):
        step = commit_step(self.options, **about)
        self.weight.grad = torch.full_like(self.weight, step.gradient_factor * gradient)
        self.weight.data.sub_(self.weight.grad, alpha=step.direct)
        self.optimizer.param_groups[0].update(step.options)
        self.optimizer.step()
        return self.weight.item()


def displacement(make, options, *, share, behind=0.0, batches=200):
    """How far a scalar moves in the last one of these global batches on a constant gradient."""
    weight = Weight(make, options)
    places = [weight.commit(1.0, share=share, behind=behind) for _ in range(round(batches / share))]
    return places[-1 - round(1 / share)] - places[-1]


@pytest.mark.parametrize(
    ("options", "share", "behind", "rate"),
    [
        ({"lr": 0.1}, 0.25, 0.0, 0.025),
        ({"lr": 0.1}, 0.25, 4.0, 0.025),
        (SGD | {"momentum": 0.0}, 0.0625, 3.0, 0.00625),
        (ADAM, 0.25, 3.0, 0.0025),
        ({"lr": 0.01, "alpha": 0.99, "momentum": 0.5}, 0.5, 1.0, 0.01 * 0.5 / 1.3),
    ],
)
def test_the_rate_follows_share_and_staleness_and_nothing_else_changes(options, share, behind, rate):
    new, *more = commit_step(options, share=share, behind=behind)
    assert new["lr"] == pytest.approx(rate, rel=1e-12)
    assert new | {"lr": options["lr"]} == options
    assert more == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "share", "behind", "expected"),
    [
        (SGD, 0.25, 0.0, 0.25),
        (SGD, 0.25, 0.5, 0.25 / 1.45),
        (SGD, 0.25, 1.0, 0.25 / 1.9),
        (SGD | {"nesterov": True}, 0.25, 1.0, 0.25 / 1.9),
        (SGD | {"momentum": 0.5, "dampening": 0.5}, 0.25, 2.0, 0.25 / 2.0),
    ],
)
def test_with_sgds_momentum_the_gradient_follows_and_momentum_counts_samples(options, share, behind, expected):
    momentum = options["momentum"]
    new, factor, compensation, direct = commit_step(options, share=share, behind=behind)
    assert factor == pytest.approx(expected, rel=1e-12)
    assert (compensation > 0.0) == (behind > 0.0)
    assert direct == pytest.approx(options["lr"] * (1 - options["dampening"]), rel=1e-12)
    assert new == options | {
        "lr": pytest.approx(options["lr"] * momentum * (1 - momentum**share) / (1 - momentum), rel=1e-12),
        "momentum": pytest.approx(momentum**share, rel=1e-12),
        "weight_decay": pytest.approx(expected * options["weight_decay"] / momentum, rel=1e-12),
        "nesterov": False,
    }


def test_another_optimizer_with_a_dampening_is_not_taken_for_sgd():
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "trust": 0.001}
    assert commit_step(options, share=0.5, behind=0.0) == (options | {"lr": 0.05}, 1.0, 0.0, 0.0)


def test_options_that_an_optimizer_lacks_are_not_made_up():
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0}
    assert commit_step(options, share=0.5, behind=1.0).options.keys() == options.keys()


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6))
def test_parts_of_one_gradient_move_about_as_far_as_the_whole_however_they_are_cut(parts):
    """After the momentum has run out: a small part must not weigh more than a large one in any later step.

    It is not exact where shares differ, since torch's buffer takes in a gradient before it moves the weights.
    """
    weight = Weight(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    for share in parts:
        weight.commit(1.0, share=share, behind=1e-12)
    for _ in range(400):
        moved = weight.commit(0.0, share=0.5, behind=0.0)
    as_under_bsp = -0.1 * sum(parts) / (1 - 0.9)
    assert moved == pytest.approx(as_under_bsp, rel=0.06)


@pytest.mark.parametrize("options", [SGD, ADAM, {"lr": 1 / 3}])
@pytest.mark.parametrize("rule", RATES)
def test_a_whole_global_batch_that_is_not_stale_keeps_the_options_exactly(options, rule):
    step = commit_step(options, share=1.0, behind=0.0, rule=rule)
    assert step == (options, 1.0, 0.0, 0.0)
    assert step.options is not options


def test_who_climbs_is_made_up_for_the_other_way_round():
    step, down = (commit_step(SGD | {"maximize": up}, share=0.5, behind=1.0) for up in (True, False))
    assert step.compensation == -down.compensation < 0.0
    assert step.direct == -down.direct < 0.0


def test_one_worker_that_overlaps_its_exchange_is_stale_by_its_whole_batch():
    assert commit_step(SGD, share=1.0, behind=1.0).gradient_factor == pytest.approx(1 / 1.9)


@given(st.floats(0.001, 2.0), st.floats(0.0, 100.0))
def test_raw_keeps_the_options_at_any_share_and_staleness(share, behind):
    assert commit_step(SGD, share=share, behind=behind, rule="raw") == (SGD, 1.0, 0.0, 0.0)


def test_the_options_that_were_given_stay_as_they_were():
    given_options = dict(SGD)
    commit_step(given_options, share=0.5, behind=1.0)
    assert given_options == SGD


@given(
    st.floats(0.0, 1.0, exclude_max=True), st.floats(0.001, 0.999), st.floats(0.0, 50.0), st.floats(0.0, 50.0)
)  # fmt: skip
def test_more_staleness_never_makes_a_commit_count_more_nor_does_any_exceed_its_share(momentum, share, one, other):
    less, more = sorted((one, other))
    options = SGD | {"momentum": momentum}
    steps = [commit_step(options, share=share, behind=behind) for behind in (0.0, less, more)]
    counts = [(step.direct or step.options["lr"]) * step.gradient_factor for step in steps]
    assert 0.1 * share == pytest.approx(counts[0])
    assert counts[0] >= counts[1] >= counts[2] > 0.0


def test_a_momentum_that_forgets_nothing():
    step = commit_step(SGD | {"momentum": 1.0}, share=0.5, behind=1.0)
    assert step.options == SGD | {"momentum": 1.0, "lr": 0.05, "weight_decay": 0.25e-4}
    assert step.gradient_factor == 0.25
    rmsprop = {"lr": 0.1, "alpha": 0.9, "momentum": 1.0}
    assert commit_step(rmsprop, share=0.5, behind=0.0).options["lr"] == 0.05
    assert commit_step(rmsprop, share=0.5, behind=1.0).options["lr"] == pytest.approx(0.0, abs=1e-9)


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
    whole = displacement(make, options, share=1.0)
    assert displacement(make, options, share=share) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_staleness_of_one_global_batch_takes_part_of_what_momentum_gains(nesterov):
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": nesterov}
    assert displacement(torch.optim.SGD, options, share=1 / 16, behind=1.0) == pytest.approx(1 / 1.9, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 1.0}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("commits", [1, 7])
def test_looking_ahead_is_where_momentum_alone_takes_the_weights(make, options, commits):
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight], **options)
    for gradient in ([1.0, -2.0, 0.5], [0.3, 1.0, -1.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    distance = look_ahead(optimizer.param_groups[0], commits)
    ahead = weight.detach() - distance * optimizer.state[weight]["momentum_buffer"]
    for _ in range(commits):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.testing.assert_close(ahead, weight.detach())


@pytest.mark.parametrize(
    ("options", "commits", "rule"),
    [
        (SGD, 0, "share"),
        *((SGD, 3, rule) for rule in RATES if rule != "share"),
        (SGD | {"momentum": 0.0}, 3, "share"),
        (ADAM | {"betas": (0.0, 0.9)}, 3, "share"),
        ({"lr": 0.1}, 3, "share"),
    ],
)
def test_nothing_looks_ahead_without_staleness_or_momentum_or_under_another_rule(options, commits, rule):
    assert look_ahead(options, commits, rule=rule) == 0.0


@pytest.mark.parametrize(
    ("share", "behind", "commits", "power"),
    [
        (1 / 16, 15 / 4, 4, 1 / 15),  # One slow worker, past which a group of 15 has pushed four times.
        (15 / 16, 1 / 16, 1, 1.0),  # That group, past which the slow worker has.
        (1 / 4, 3 / 4, 3, 1.0),  # Equal ones.
        (1 / 4, 0.0, 0, 1.0),
    ],
)
def test_a_commit_moves_momentum_on_by_its_part_of_those_that_it_missed(share, behind, commits, power):
    about = {"share": share, "behind": behind, "commits": commits}
    new = commit_step(ADAM, **about).options
    assert new["betas"] == pytest.approx((0.9**power, 0.999**power), rel=1e-12)
    assert new["lr"] == pytest.approx(0.01 * share)
    # SGD's momentum counts samples, whatever the other commits were.
    assert commit_step(SGD, **about) == commit_step(SGD, share=share, behind=behind)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_small_commits_between_large_ones_change_little_of_what_the_large_ones_move(momentum):
    """One large gradient, and then nothing: how far it carries in the end."""
    moved = []
    for small in (0, 3):
        weight = Weight(torch.optim.SGD, {"lr": 0.1, "momentum": momentum})
        for number in range(400):
            large = number % (small + 1) == 0
            about = {"share": 1.0, "behind": 0.0} if large else {"share": 0.01, "behind": 1.0, "commits": 1}
            moved_to = weight.commit(1.0 if number == 0 else 0.0, **about)
        moved.append(moved_to)
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


def test_looking_ahead_with_adam_follows_its_first_moment():
    assert look_ahead(ADAM, 2) == pytest.approx(0.01 * (0.9 + 0.81), rel=1e-12)


@pytest.mark.parametrize(("norm", "factor"), [(0.0, 1.0), (0.5, 1.0), (2.0, 1.0), (8.0, 0.25)])
def test_a_gradient_is_scaled_down_to_its_largest_norm_and_never_up(norm, factor):
    assert clip_factor(norm, 2.0) == factor

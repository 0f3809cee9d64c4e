"""Real gradients in virtual time: the simulator's schedule, and the update rule of torch and of the servers."""

import pytest
import torch
from harness import regimes, side_by_side, stacked
from harness.schedule import Committed, Given, schedule
from time_to_accuracy import seconds_to

from evenstep.core.sync.rate import commit_step, look_ahead
from evenstep.protocol.layout import ParameterSpec, ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec
from evenstep.schemes import parse_scheme
from evenstep.server.shard.shard import Shard
from evenstep.server.shard.updates import UpdateRule
from evenstep.sim import Scenario, simulate
from evenstep.tensors.messages import flat_views

BATCH = 40
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, side_by_side.sgd([0.1])),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, side_by_side.sgd([0.1], 0.9)),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        side_by_side.sgd([0.1], 0.9, nesterov=True),
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01}, side_by_side.adam([0.01])),
}


def scenario(scheme, regime="episodic", iterations=12):
    return Scenario(
        cluster=regimes.cluster(regime, 3, BATCH), scheme=parse_scheme(scheme), global_batch_size=BATCH,
        iterations=iterations, epoch_samples=BATCH * 5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "scheme",
    ["bsp", "lb-bsp", "asp", "ssp:bound=1", "dssp:load=lb-bsp", "grouped:groups=4,inside=lb-bsp,across=ssp", "grouped"],
)
def test_a_schedule_has_the_simulators_commits(scheme):
    run, events = simulate(scenario(scheme)), schedule(scenario(scheme))
    commits = [event for event in events if isinstance(event, Committed)]
    assert len(commits) == run.commits
    assert commits[-1].at == pytest.approx(run.seconds)
    # On servers the last push may hold a few samples more than were asked for.
    assert sum(event.share for event in commits) == pytest.approx(run.samples / BATCH)
    assert 12 <= run.samples / BATCH < 13
    assert sum(event.samples for event in events if isinstance(event, Given)) >= run.samples
    staleness = sum(event.stale * len(event.workers) for event in commits)
    assert staleness == pytest.approx(sum(each.mean_staleness * each.iterations for each in run.workers))


@pytest.fixture(scope="module")
def digits():
    return stacked.digits()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_behind_a_barrier_it_is_torchs_optimizer(case, digits):
    make, options, ours = OPTIMIZERS[case]
    events = schedule(scenario("lb-bsp"))
    ((_, values),) = side_by_side.train(digits, events, [ours], 1, 12)
    weights = torch.nn.Parameter(digits.first(1)[None].clone())
    optimizer, order = make([weights], **options), side_by_side.Order(len(digits.train[1]), 1)
    for _ in range(12):
        weights.grad = digits.gradient(weights.data, order.take(BATCH))
        optimizer.step()
    assert values == digits.tested(weights.data)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_stale_commits_count_as_on_a_server(case):
    make, options, _ = OPTIMIZERS[case]
    generator = torch.Generator().manual_seed(0)
    layout = ShardLayout.of([ParameterSpec(name="w", shape=(5,), dtype="float32", group=0)])
    every = {
        name: value for name, value in make([torch.zeros(1)], **options).param_groups[0].items() if name != "params"
    }
    known = {name: every[name] for name in ("lr", "momentum", "dampening", "nesterov", "betas", "eps") if name in every}
    shard = Shard(layout, [UpdateRule(OptimizerSpec(name=make.__name__, groups=(known,)))])
    ours = side_by_side.Optimizer([options["lr"]], **{**known, "lr": 1.0})
    weights, computed_on = torch.zeros(1, 5), torch.zeros(1, 5)

    def message(values):
        made = torch.zeros(layout.nbytes, dtype=torch.uint8)
        flat_views(layout, made)[0][:5].copy_(values[0])
        return made

    for stale, behind, share in ((0, 0.0, 0.5), (2, 0.7, 0.25), (7, 1.2, 0.1), (1, 0.4, 0.4)):
        commit = Committed(0.0, (0,), share, behind, stale)
        gradient = torch.randn(1, 5, generator=generator)
        step = commit_step(known, share=share, behind=behind, commits=stale)
        shard.commit(
            [(message(gradient), 1.0)], [step.options], [step.gradient_factor], stale=message(computed_on),
            compensation=[step.compensation], direct=[step.direct],
        )  # fmt: skip
        weights = ours.commit(weights, gradient, computed_on, commit)
        computed_on = ours.given(weights, Given(0, 1, stale, behind))
        ahead = 0.0
        if stale:
            # As `server.commits` does.
            expected = commit_step(known, share=behind / stale, behind=behind).options
            ahead = look_ahead(expected, stale)
        read = message(torch.zeros(1, 5))
        shard.read_weights(read, [ahead])
        # Adam's direction on a server has the bias corrections of the options of its latest commit.
        if case != "adam":
            torch.testing.assert_close(flat_views(layout, read)[0][:5], computed_on[0])
    shard.read_weights(read)
    torch.testing.assert_close(flat_views(layout, read)[0][:5], weights[0])


@pytest.mark.parametrize("make", [stacked.digits, stacked.text])
def test_runs_side_by_side_do_not_see_each_other(make):
    task, rows = make(), torch.arange(6)
    weights = torch.stack([task.first(seed) for seed in range(2)])
    together = task.gradient(weights, rows)
    for run in range(2):
        torch.testing.assert_close(together[run], task.gradient(weights[run : run + 1], rows)[0], rtol=1e-4, atol=1e-6)
    assert task.held_out(0).test[1].shape[1:] == task.test[1].shape[1:]


def test_a_later_letter_does_not_change_the_scores_of_an_earlier_one():
    task = stacked.text()
    weights, inputs = task.first(0)[None], task.test[0][:1].clone()
    before = task.scores(task._parts(weights), inputs)
    inputs[0, 7] = (inputs[0, 7] + 1) % 32
    after = task.scores(task._parts(weights), inputs)
    assert torch.equal(before[0, 0, :7], after[0, 0, :7])
    assert not torch.equal(before[0, 0, 7:], after[0, 0, 7:])


def test_local_sgd_averages_what_workers_made_of_the_same_weights(digits):
    curve = side_by_side.train_locally(digits, scenario("local-sgd"), 5, [side_by_side.sgd([0.05, 0.1], 0.9)], 0)
    assert len(curve) == 3  # At the ends of epochs.
    assert curve[-1][0] == pytest.approx(simulate(scenario("local-sgd")).seconds)
    assert all(last > first for first, last in zip(curve[0][1], curve[-1][1], strict=True))


@pytest.mark.parametrize(
    ("values", "target", "seconds"),
    [
        ([-90, -95, -94, -95, -96], 95.0, 3),
        ([-90, -95, -94], 95.0, None),
        ([3.0, 2.4, 2.3], 2.4, 1),
        ([float("nan")] * 3, 2.4, None),
    ],
)
def test_time_counts_to_the_first_of_two_evaluations_at_the_target(values, target, seconds):
    assert seconds_to(list(enumerate(values)), target) == seconds

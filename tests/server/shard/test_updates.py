import inspect

import msgspec
import pytest
import torch
from support import own_optimizers

from evenstep.core.errors import ConfigError
from evenstep.protocol.optimizer import OptimizerSpec
from evenstep.server.shard.independent import require_independent
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.optimizers import OPTIMIZERS
from evenstep.torch.engines.describe import describe, options_of, state_by_index, state_by_name


def weights():
    return torch.nn.Parameter(torch.zeros(3))


def sgd(**options):
    return torch.optim.SGD([weights()], **options)


PARAMETERS = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(300, 260), (300,), (8, 4, 3, 3), (), (0, 2)]]


class OfAUser(torch.optim.SGD):
    pass


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_described_optimizer_survives_the_wire(name):
    spec = describe(OPTIMIZERS[name]([weights()], lr=0.5))
    received = msgspec.json.decode(msgspec.json.encode(spec), type=OptimizerSpec)
    assert received == spec
    assert spec.groups[0]["lr"] == 0.5
    parameter = weights()
    optimizer = UpdateRule(received).build([[parameter]])
    assert type(optimizer) is OPTIMIZERS[name]
    assert describe(optimizer) == spec


def test_options_say_what_is_computed_and_not_how():
    spec = describe(sgd(lr=torch.tensor(0.5), momentum=0.9, foreach=False, differentiable=True))
    assert set(spec.groups[0]) == {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}
    assert spec.groups[0]["lr"] == 0.5


def test_present_options_follow_a_scheduler():
    optimizer = sgd(lr=0.5)
    spec = describe(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    assert options_of(spec, optimizer)[0]["lr"] == 0.25
    optimizer.add_param_group({"params": [weights()]})
    with pytest.raises(ConfigError, match="before it"):
        options_of(spec, optimizer)


@pytest.mark.parametrize("kind", [OfAUser, torch.optim.LBFGS, torch.optim.Rprop])
def test_another_optimizer_is_refused_with_what_is_possible(kind):
    with pytest.raises(ConfigError, match=r"SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta.*optimizer=my_module:MyClass"):
        describe(kind([weights()], lr=0.1))


def test_a_users_class_runs_where_it_is_allowed_by_name():
    optimizer, allowed = own_optimizers.Signs([weights()], betas=(0.5, 0.9)), ["support.own_optimizers:Signs"]
    spec = describe(optimizer, allowed)
    assert spec.name == allowed[0]
    built = UpdateRule(spec, allowed).build([[weights()]])
    assert type(built) is own_optimizers.Signs
    assert built.param_groups[0]["betas"] == (0.5, 0.9)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (own_optimizers.LimitsTheWhole, "its update of a parameter depends on other parameters"),
        (own_optimizers.Noisy, "it keeps more than optimizer.state holds, or draws numbers, so a run could not"),
        (own_optimizers.Lists, "its state 'means' (list) is neither a tensor nor a number"),
        (own_optimizers.CountsInItself, "it keeps more than optimizer.state holds, or draws numbers"),
        (own_optimizers.CountsInItsGroup, "it keeps more than optimizer.state holds, or draws numbers"),
        (own_optimizers.KeepsMemory, "it keeps more than optimizer.state holds, or draws numbers"),
        (own_optimizers.WithoutRate, "its step does not scale with its learning rate"),
        (
            own_optimizers.HidesAnArgument,
            "its option 'gamma' is not both an argument of its constructor",
        ),
        (own_optimizers.NeedsAClosure, "its step fails on a plain tensor (TypeError: "),
    ],
)
def test_what_servers_cannot_run_is_refused_with_the_reason(kind, reason):
    name = f"{kind.__module__}:{kind.__name__}"
    with pytest.raises(ConfigError) as raised:
        describe(kind(PARAMETERS), [name])
    assert str(raised.value).startswith(f"servers cannot run {name}: ")
    assert reason in str(raised.value)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_those_of_torch_update_each_parameter_by_itself(kind):
    known = set(inspect.signature(kind).parameters)
    options = [{}, {"weight_decay": 0.1}, {"maximize": True}, {"amsgrad": True}]
    groups = tuple({"lr": 0.0, **each} for each in options if known.issuperset(each))
    shapes = [(40, 30), (7,), (5, 3, 2)]
    parameters = [(shapes[number % 3], number % len(groups)) for number in range(6)]
    require_independent(OptimizerSpec(name=kind.__name__, groups=groups), (), parameters)


@pytest.mark.parametrize(
    "kind",
    [
        own_optimizers.ByNorm,
        own_optimizers.ByRow,
        own_optimizers.Centralises,
        own_optimizers.DecaysMatrices,
        own_optimizers.TrainsWhatRequiresIt,
    ],
)
def test_what_depends_on_a_parameter_and_its_shape_alone_is_run(kind):
    describe(kind(PARAMETERS), [f"{kind.__module__}:{kind.__name__}"])


def test_parameters_in_groups_of_different_options_are_tried_together():
    name = "support.own_optimizers:Signs"
    groups = [{"params": [each], "weight_decay": number / 10} for number, each in enumerate(PARAMETERS)]
    assert describe(own_optimizers.Signs(groups), [name]).groups[1]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Rprop, "Rprop: its step does not scale with its learning rate"),
        (torch.optim.Adafactor, r"do not support the option eps=\(None, 0\.001\): use finite numbers"),
        (torch.optim.Muon, "Muon: its step fails on a plain tensor"),
    ],
)
def test_others_of_torch_are_refused(kind, reason):
    with pytest.raises(ConfigError, match=reason):
        describe(kind([torch.nn.Parameter(torch.zeros(3, 3))]), [f"torch.optim:{kind.__name__}"])


@pytest.mark.parametrize("allowed", ["os:system", "no.such:Module", "torch.optim:Nothing", "Lion", ":"])
def test_a_name_is_run_only_if_allowed_and_an_optimizer(allowed):
    spec = OptimizerSpec(name=allowed, groups=({"lr": 0.1},))
    with pytest.raises(ConfigError, match="may not run"):
        UpdateRule(spec)
    with pytest.raises(ConfigError, match=r"cannot be imported|not a torch optimizer"):
        UpdateRule(spec, allowed=[allowed])


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        {},
        {"name": 1, "groups": [{}]},
        {"name": "SGD"},
        {"name": "SGD", "groups": []},
        {"name": "SGD", "groups": 1},
    ],
)
def test_a_malformed_spec_is_refused(malformed):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(malformed, OptimizerSpec)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.1", None, [0.1] * 9, [[0.1]], {}, 10**400, ["a"]])
def test_malformed_options_are_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "SGD", "groups": [{"lr": value}]}, OptimizerSpec)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"no": 1.0}, {"lr": (0.1, 0.2)}, {"momentum": -0.5}])
def test_options_that_torch_refuses_are_refused(options):
    with pytest.raises(ConfigError, match="SGD does not take"):
        UpdateRule(OptimizerSpec(name="SGD", groups=({"lr": 0.1}, options)))


@pytest.mark.parametrize(
    "changed",
    [
        {"amsgrad": True},
        {"lr": -0.1},
        {"lr": 1e300},
        {"lr": True},
        {"betas": (0.9,)},
        {"betas": (1.0, 0.9)},
        {"betas": 0.9},
        {"maximize": 1.0},
        {"params": 1.0},
        {"foreach": True},
    ],
)
def test_options_that_cannot_change_in_training_are_refused(changed):
    update = UpdateRule(describe(torch.optim.Adam([weights()], lr=0.1)))
    update.check([{"lr": 0.2, "betas": (0.5, 0.6), "maximize": True, "weight_decay": 0.1}])
    with pytest.raises(ConfigError):
        update.check([changed])


def test_momentum_may_begin_in_sgd_but_not_in_rmsprop():
    UpdateRule(describe(sgd(lr=0.1))).check([{"momentum": 0.9}])
    with pytest.raises(ConfigError, match="momentum cannot change"):
        UpdateRule(describe(torch.optim.RMSprop([weights()]))).check([{"momentum": 0.9}])


def test_half_precision_takes_the_arithmetic_of_a_worker():
    start = torch.randn(1000, generator=torch.manual_seed(1)).bfloat16()
    ours, theirs = start.clone(), start.clone()
    optimizers = [
        UpdateRule(describe(torch.optim.Adam([theirs]))).build([[ours]]),
        torch.optim.Adam([theirs], foreach=False),
    ]
    for _ in range(3):
        gradient = torch.randn(1000).bfloat16()
        ours.grad, theirs.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_states_go_by_name_and_back():
    first, second = weights(), weights()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second]}])
    second.grad = torch.ones(3)
    optimizer.step()
    state_dict = optimizer.state_dict()
    states = state_by_name(optimizer, {first: "first", second: "second"}, state_dict)
    assert list(states) == ["second"]
    assert state_by_index(optimizer, {first: "first", second: "second"}, states) == state_dict["state"]

import io
import math

import pytest
import torch
from support import own_optimizers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenstep.core.errors import ConfigError
from evenstep.server.shard.shard import Shard
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.messages import flat_views, gather, parameter_views, scatter
from evenstep.torch.engines.describe import describe, layout_of, options_of, state_by_index, state_by_name

CASES = {
    "sgd": (torch.optim.SGD, {}),
    "sgd with weight decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "maximize": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "by the norm": (own_optimizers.ByNorm, {}),
    "by rows": (own_optimizers.ByRow, {}),
}
TORCHS = [case for case, (kind, _) in CASES.items() if kind.__module__.startswith("torch.")]


class Run:
    """A model with two param groups, an optimizer of its own, and shards that hold the same weights."""

    def __init__(self, case, shards=2, dtype=torch.float64, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)).to(dtype)
        kind, options = CASES[case]
        groups = [
            {"params": self.model[:2].parameters(), "lr": 0.02},
            {"params": self.model[2:].parameters(), "lr": 0.01},
        ]
        self.optimizer = kind(groups, **options)
        self.parameters = dict(self.model.named_parameters())
        self.names = {parameter: name for name, parameter in self.parameters.items()}
        self.allowed = () if case in TORCHS else (f"{kind.__module__}:{kind.__name__}",)
        self.spec = describe(self.optimizer, self.allowed)
        self.layouts = layout_of(self.parameters.items(), [self.optimizer]).shards(shards)
        self.shards = [self.shard(layout) for layout in self.layouts]
        for shard in self.shards:
            message = self.message(shard)
            scatter(
                [self.parameters[p.name].detach() for p in shard.layout.parameters],
                parameter_views(shard.layout, message),
            )
            shard.initialise(message)

    def shard(self, layout):
        return Shard(layout, [UpdateRule(self.spec, self.allowed)])

    def message(self, shard):
        return torch.zeros(shard.layout.nbytes, dtype=torch.uint8)

    def gradients(self, shard):
        message = self.message(shard)
        gather([self.parameters[p.name] for p in shard.layout.parameters], parameter_views(shard.layout, message))
        return message

    def backward(self, generator, samples=4):
        inputs = torch.randn(samples, 7, generator=generator, dtype=torch.float64)
        self.optimizer.zero_grad()
        loss = self.model(inputs.to(self.model[0].weight.dtype)).square().mean()
        (-loss if self.optimizer.defaults.get("maximize") else loss).backward()
        return inputs

    def commit(self, **how):
        for shard in self.shards:
            shard.commit([(self.gradients(shard), 1.0)], options_of(self.spec, self.optimizer), **how)

    def step(self, generator):
        """One commit, and the same by torch itself."""
        self.backward(generator)
        self.commit()
        self.optimizer.step()
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] *= 0.97 + 0.01 * number

    def weights(self):
        weights = {}
        for shard in self.shards:
            message = self.message(shard)
            shard.read_weights(message)
            names = [parameter.name for parameter in shard.layout.parameters]
            weights.update(zip(names, parameter_views(shard.layout, message), strict=True))
        return weights

    def states(self):
        return {name: state for shard in self.shards for name, state in shard.optimizer_state()}

    def check(self):
        weights = self.weights()
        assert weights.keys() == self.parameters.keys()
        for name, parameter in self.parameters.items():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def one_thread():
    """As in a server: torch's fused updates wake all threads for the smallest tensor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_commits_equal_torch_on_the_model(case, shards, generator):
    run = Run(case, shards)
    start = run.weights()
    for _ in range(50):
        run.step(generator)
    run.check()
    assert all(not torch.equal(weight, start[name]) for name, weight in run.weights().items())


@pytest.mark.parametrize("case", ["momentum", "adam"])
def test_weighted_pushes_equal_the_gradient_of_the_union_batch(case, generator):
    run = Run(case)
    for _ in range(10):
        pushes, parts = [], []
        for samples in (3, 1, 4):
            parts.append(run.backward(generator, samples))
            pushes.append([(run.gradients(shard), samples / 8) for shard in run.shards])
        for shard, messages in zip(run.shards, zip(*pushes, strict=True), strict=True):
            shard.commit(messages, options_of(run.spec, run.optimizer))
        run.optimizer.zero_grad()
        run.model(torch.cat(parts)).square().mean().backward()
        run.optimizer.step()
    run.check()


def test_global_clipping_equals_that_of_torch(generator):
    run = Run("momentum")
    for _ in range(10):
        run.backward(generator)
        norm = math.sqrt(sum(shard.squared_norm([(run.gradients(shard), 1.0)]) for shard in run.shards))
        run.commit(factors=[min(1.0, 0.05 / (norm + 1e-6))] * len(run.optimizer.param_groups))
        assert float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)) == pytest.approx(norm, rel=1e-12)
        run.optimizer.step()
    run.check()


@pytest.mark.parametrize("weights", [[1.0], [0.25, 0.75]])
def test_each_groups_gradient_is_taken_times_its_factor(weights, generator):
    run = Run("momentum")
    factors = [0.5, 0.0]
    for _ in range(4):
        run.backward(generator)
        for shard in run.shards:
            messages = [(run.gradients(shard), weight) for weight in weights]
            shard.commit(messages, options_of(run.spec, run.optimizer), factors)
        for group, factor in zip(run.optimizer.param_groups, factors, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        run.optimizer.step()
    run.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_has_changed_is_made_up_for_and_a_part_moves_the_weights_at_once(dtype, generator):
    run = Run("momentum", 1, dtype)
    (shard,) = run.shards
    stale = run.message(shard)
    shard.read_weights(stale)
    for _ in range(2):
        run.step(generator)
    run.backward(generator)
    factors, compensation, direct = [0.5, 1.0], [3.0, 0.0], [0.25, 0.0]
    parameters = [run.parameters[each.name] for each in shard.layout.parameters]
    shard.commit(
        [(run.gradients(shard), 1.0)],
        options_of(run.spec, run.optimizer),
        factors,
        stale=stale,
        compensation=compensation,
        direct=direct,
    )
    with torch.no_grad():
        for spec, parameter, then in zip(
            shard.layout.parameters, parameters, parameter_views(shard.layout, stale), strict=True
        ):
            gradient = parameter.grad.double()
            moved = parameter.double() - then.double()
            gradient += compensation[spec.group] * gradient.abs() * moved
            parameter.grad.copy_(factors[spec.group] * gradient)
            parameter.sub_(parameter.grad, alpha=direct[spec.group])
    run.optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, run.parameters[name].detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["sgd", "momentum", "adam", "adamw amsgrad", "rmsprop"])
def test_weights_can_be_read_as_momentum_would_move_them(case, generator):
    run = Run(case, 1)
    (shard,) = run.shards
    plain, ahead = run.message(shard), run.message(shard)
    distances = [0.25, 0.0]
    shard.read_weights(plain)
    shard.read_weights(ahead, distances)
    assert torch.equal(plain, ahead)  # Before the first update there is nothing to move them along.
    for _ in range(3):
        run.step(generator)
    shard.read_weights(plain)
    shard.read_weights(ahead, distances)
    states, layout = run.states(), shard.layout
    for parameter, weights, there in zip(
        layout.parameters, parameter_views(layout, plain), parameter_views(layout, ahead), strict=True
    ):
        state = states.get(parameter.name, {})
        if "exp_avg" in state:
            beta1, beta2 = run.optimizer.defaults["betas"]
            square = state.get("max_exp_avg_sq", state["exp_avg_sq"]) / (1 - beta2**3)
            direction = state["exp_avg"] / (1 - beta1**3) / (square.sqrt() + run.optimizer.defaults["eps"])
        else:
            direction = state.get("momentum_buffer", torch.zeros_like(weights))
        torch.testing.assert_close(there, weights - distances[parameter.group] * direction)
    assert torch.equal(plain, ahead) == (case == "sgd")
    run.check()


def test_squared_norm_is_that_of_the_weighted_sum(generator):
    (shard,) = Run("sgd", 1, torch.float32).shards
    first, second = (torch.zeros(shard.layout.nbytes, dtype=torch.uint8) for _ in range(2))
    for message, value in ((first, 3.0), (second, 1.0)):
        for flat in flat_views(shard.layout, message):
            flat.fill_(value)
    elements = sum(parameter.elements for parameter in shard.layout.parameters)
    assert shard.squared_norm([(first, 1.0), (second, -1.0)]) == pytest.approx(4 * elements, rel=1e-12)
    assert shard.squared_norm([(first, 0.5)]) == pytest.approx(2.25 * elements, rel=1e-12)
    assert shard.squared_norm([]) == 0
    for large, squares in ((1e30, 1e60), (math.inf, math.inf)):
        flat_views(shard.layout, first)[-1][-1] = large
        assert shard.squared_norm([(first, 1.0)]) == pytest.approx(squares, rel=1e-6)
    flat_views(shard.layout, first)[-1][-1] = math.nan
    assert math.isnan(shard.squared_norm([(first, 1.0)]))
    assert shard.squared_norm([(first, 0.0), (second, 1.0)]) == pytest.approx(elements, rel=1e-12)


def test_squared_norm_of_huge_gradients_is_infinite():
    (shard,) = Run("sgd", 1).shards
    message = torch.zeros(shard.layout.nbytes, dtype=torch.uint8)
    flat_views(shard.layout, message)[0].fill_(1e300)
    assert shard.squared_norm([(message, 1.0)]) == math.inf


@pytest.mark.parametrize(("weights", "factor"), [([1.0], 1.0), ([0.5, 0.5], 1.0), ([1.0], 0.5)])
def test_the_first_message_holds_the_sum_and_all_are_let_go(weights, factor, generator):
    run = Run("momentum", 1)
    (shard,) = run.shards
    run.backward(generator)
    gradients = run.gradients(shard)
    pushed = [bytearray(gradients.numpy()) for _ in weights]
    options = options_of(run.spec, run.optimizer)
    messages = [(memoryview(each), weight) for each, weight in zip(pushed, weights, strict=True)]
    shard.commit(messages, options, [factor] * len(options))
    for flat, whole in zip(
        flat_views(shard.layout, memoryview(pushed[0])), flat_views(shard.layout, gradients), strict=True
    ):
        assert torch.allclose(flat, factor * whole)
    assert pushed[1:] == [bytes(gradients.numpy())] * len(pushed[1:])
    del messages, flat
    for each in pushed:
        each.clear()  # An error while anything still looks into it.


def test_pushes_that_do_not_count_change_nothing():
    run = Run("momentum", 1)
    (shard,) = run.shards
    before = run.message(shard)
    shard.read_weights(before)
    broken = torch.full_like(before, 255)
    for messages in ([], [(broken, 0.0)]):
        shard.commit(messages, options_of(run.spec, run.optimizer))
    after = run.message(shard)
    shard.read_weights(after)
    assert torch.equal(before, after)
    assert not run.states()


@pytest.mark.parametrize("options", [[], [{}], [{"lr": 0.1}, {"lr": -0.1}], [{"lr": 0.1}, {"lr": 0.1}, {}]])
def test_wrong_options_are_refused_before_anything_changes(options, generator):
    run = Run("adam", 1)
    (shard,) = run.shards
    run.step(generator)
    run.backward(generator)
    with pytest.raises(ConfigError):
        shard.commit([(run.gradients(shard), 1.0)], options)
    run.check()
    run.commit()
    run.optimizer.step()
    run.check()


@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_continues_the_same(case, generator):
    run = Run(case)
    for _ in range(5):
        run.step(generator)
    saved = []
    for shard in run.shards:
        file = io.BytesIO()
        torch.save(shard.state_dict(), file)
        saved.append(file)
    run.shards = [run.shard(shard.layout) for shard in run.shards]
    for shard, file in zip(run.shards, saved, strict=True):
        file.seek(0)
        shard.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        run.step(generator)
    run.check()


def test_a_snapshot_of_another_model_is_refused():
    first, second = Run("adam").shards
    with pytest.raises(ConfigError, match="other parameters"):
        first.load_state_dict(second.state_dict())


# NAdam's load_state_dict changes the dtype of its product of momenta.
@pytest.mark.parametrize("case", [case for case in CASES if case != "nadam"])
def test_state_of_the_shards_continues_in_a_plain_optimizer_and_back(case, generator):
    run = Run(case, 3)
    for _ in range(5):
        run.step(generator)
    state_dict = run.optimizer.state_dict()
    given = {"state": state_by_index(run.optimizer, run.names, run.states())}
    assert given["state"].keys() == {index for index, state in state_dict["state"].items() if any_value(state)}
    run.optimizer.load_state_dict({**state_dict, **given})
    for _ in range(5):
        run.step(generator)
    run.check()
    states = state_by_name(run.optimizer, run.names, run.optimizer.state_dict())
    for shard in run.shards:
        shard.load_optimizer_state(states)
    for _ in range(5):
        run.step(generator)
    run.check()


def any_value(state):
    return any(value is not None for value in state.values())


def test_parameters_with_different_counts_of_steps_keep_them(generator):
    run = Run("adam", 1)
    bias, weight = run.parameters["0.bias"], run.parameters["2.weight"]
    for number in range(6):
        run.backward(generator)
        bias.grad = bias.grad if number < 3 else None
        weight.grad = None
        run.optimizer.step()
    states = state_by_name(run.optimizer, run.names, run.optimizer.state_dict())
    (shard,) = run.shards
    message = run.message(shard)
    scatter([run.parameters[p.name].detach() for p in shard.layout.parameters], parameter_views(shard.layout, message))
    shard.initialise(message)
    shard.load_optimizer_state(states)
    assert {name: float(state["step"]) for name, state in run.states().items()} == {
        name: float(state["step"]) for name, state in states.items()
    }
    for _ in range(5):
        run.step(generator)
    run.check()


@pytest.mark.parametrize(
    "broken",
    [
        {"exp_avg": None},
        {"exp_avg": torch.zeros(6, 7, dtype=torch.int64)},
        {"exp_avg_sq": torch.zeros(7, 6)},
        {"exp_avg_sq": 1.0},
        {"step": "5"},
        {"step": torch.zeros(2)},
        {"another": torch.zeros(3)},
    ],
)
def test_a_broken_optimizer_state_is_refused_before_anything_changes(broken, generator):
    run = Run("adam", 1)
    run.step(generator)
    states = run.states()
    states["0.weight"] |= broken
    with pytest.raises(ConfigError, match=r"'0\.weight' lacks"):
        run.shards[0].load_optimizer_state(states)
    run.step(generator)
    run.check()


def test_several_optimizers_step_their_own_groups(generator):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.Linear(6, 1)).double()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
    parameters = dict(model.named_parameters())
    specs = [describe(optimizer) for optimizer in optimizers]
    shards = [Shard(p, [UpdateRule(s) for s in specs]) for p in layout_of(parameters.items(), optimizers).shards(4)]
    for shard in shards:
        (spec,) = shard.layout.parameters
        message = torch.zeros(shard.layout.nbytes, dtype=torch.uint8)
        scatter([parameters[spec.name].detach()], parameter_views(shard.layout, message))
        shard.initialise(message)
    options = [group for spec in specs for group in spec.groups]
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 7, generator=generator, dtype=torch.float64)).square().mean().backward()
        for shard in shards:
            message = torch.zeros(shard.layout.nbytes, dtype=torch.uint8)
            gather([parameters[shard.layout.parameters[0].name]], parameter_views(shard.layout, message))
            shard.commit([(message, 1.0)], options)
        for optimizer in optimizers:
            optimizer.step()
    for shard in shards:
        message = torch.zeros(shard.layout.nbytes, dtype=torch.uint8)
        shard.read_weights(message)
        torch.testing.assert_close(
            parameter_views(shard.layout, message)[0], parameters[shard.layout.parameters[0].name].detach()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_pushes_are_summed_in_single_precision(dtype):
    run = Run("sgd", 1, dtype)
    (shard,) = run.shards
    messages = []
    for value in (1.0, 2**-12, 2**-12):
        message = run.message(shard)
        for flat in flat_views(shard.layout, message):
            flat.fill_(value)
        messages.append((message, 1.0))
    shard.initialise(run.message(shard))
    shard.commit(messages, [{"lr": 1.0}, {"lr": 1.0}])
    expected = -torch.tensor(1 + 2**-11).to(dtype)
    assert all((weight == expected).all() for weight in run.weights().values())


def test_a_message_of_another_length_is_refused():
    (shard,) = Run("sgd", 1).shards
    for use in (shard.initialise, shard.read_weights, lambda message: shard.commit([(message, 1.0)], [{}, {}])):
        with pytest.raises(ValueError, match="not a message of this shard"):
            use(torch.zeros(1, dtype=torch.uint8))


class Allocated(TorchDispatchMode):
    """Adds up what operations give out and what of it is still held: exact, where the process's own figure is not."""

    def __init__(self, *beyond):
        super().__init__()
        self.beyond = {tensor.untyped_storage().data_ptr() for tensor in beyond}
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.beyond:
                storage = tensor.untyped_storage()
                self.held[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.held = {at: (storage, nbytes) for at, (storage, nbytes) in self.held.items() if not storage.expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.held.values()))
        return result


@pytest.mark.parametrize("pushes", [1, 3])
@pytest.mark.parametrize(
    ("kind", "dtype", "copies"),
    [
        (torch.optim.SGD, torch.float32, 1),
        (torch.optim.SGD, torch.bfloat16, 1),
        (torch.optim.Adam, torch.float32, 3),
        (torch.optim.RMSprop, torch.float32, 2),
    ],
)
def test_memory_stays_within_a_fifth_beyond_weights_and_state(kind, dtype, copies, pushes):
    weights = [torch.nn.Parameter(torch.zeros(500_000, dtype=dtype)) for _ in range(16)]
    optimizer = kind(weights, lr=1e-3)
    spec = describe(optimizer)
    (layout,) = layout_of([(f"weights {number}", each) for number, each in enumerate(weights)], [optimizer]).shards(1)
    messages = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(pushes)]
    with Allocated(*messages) as allocated:
        shard = Shard(layout, [UpdateRule(spec)])
        for _ in range(2):
            shard.commit([(message, 1 / pushes) for message in messages], spec.groups)
    assert 1 <= allocated.peak / (layout.nbytes * copies) <= 1.2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_parameters_without_elements_or_axes_are_stepped_too(kind):
    parameters = {"none": torch.nn.Parameter(torch.zeros(0, 3)), "scalar": torch.nn.Parameter(torch.tensor(2.0))}
    optimizer = kind(parameters.values(), lr=0.5)
    spec = describe(optimizer)
    (layout,) = layout_of(parameters.items(), [optimizer]).shards(1)
    shard = Shard(layout, [UpdateRule(spec)])
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    scatter([each.detach() for each in parameters.values()], parameter_views(layout, message))
    shard.initialise(message)
    for _ in range(3):
        scatter([torch.zeros(0, 3), torch.tensor(3.0)], parameter_views(layout, message))
        shard.commit([(message, 1.0)], spec.groups)
        parameters["scalar"].grad = torch.tensor(3.0)
        optimizer.step()
    shard.read_weights(message)
    assert parameter_views(layout, message)[1] == pytest.approx(parameters["scalar"].item())

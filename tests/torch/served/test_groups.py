"""Groups on servers, in threads: what their members have of the weights, and what a group's push does to them."""

import copy

import pytest
import torch
from support.memory_servers import PROBLEM, SAMPLES, Trial, optimizer_of

from evenstep.core.coordinate import Apply, Arrival, Coordinator
from evenstep.core.sync.rate import commit_step
from evenstep.torch.engines.describe import describe

SCHEMES = ["grouped:groups=0+2/1", "grouped:groups=0+2/1,inside=lb-bsp,across=ssp:bound=1", "grouped:groups=1"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("shards", "local"), [(1, True), (2, False)])
def test_members_of_a_group_go_on_with_the_same_weights(tmp_path, scheme, shards, local):
    trial = Trial(tmp_path, scheme, shards, {}, local=local)
    trial.run()
    one, other = (
        {version: torch.cat([each.flatten() for each in weights]).tolist() for version, _, weights in worker.pushed}
        for worker in (trial.workers[0], trial.workers[2])
    )
    both = one.keys() & other.keys()
    assert len(both) >= SAMPLES // 15  # At the end of an epoch there may be nothing left for one of them.
    assert all(one[version] == other[version] for version in both)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_groups_push_is_one_step_with_the_mean_of_its_members_gradients(tmp_path, scheme):
    """The whole run again in one process, from what reached the server, and the weights that each push was made on."""
    trial = Trial(tmp_path, scheme, 1, {})
    model = copy.deepcopy(trial.models[0])
    optimizer = optimizer_of(model)
    trial.run()
    for update in updates(trial):
        pushes = [(trial.workers[worker], number, weight) for (worker, _, number), weight in update.pushes]
        gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for worker, number, weight in pushes:
            for total, gradient in zip(gradients, gradient_of(worker, number), strict=True):
                total += weight * gradient
        (options,) = describe(optimizer_of(model)).groups
        step = commit_step(options, share=update.share, behind=update.behind, commits=update.staleness)
        stale = pushes[0][0].pushed[pushes[0][1]][2]
        for parameter, gradient, before in zip(model.parameters(), gradients, stale, strict=True):
            moved = step.compensation * gradient.abs() * (parameter.detach() - before)
            parameter.grad = step.gradient_factor * (gradient + moved)
            parameter.data.sub_(parameter.grad, alpha=step.direct)
        optimizer.param_groups[0].update(step.options)
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(torch.tensor(trial.weights[0], dtype=expected.dtype), expected, rtol=0, atol=1e-10)


def gradient_of(worker, number):
    """Of a worker's push of that number, on the weights that it was made on."""
    _, part, weights = worker.pushed[number]
    for parameter, weight in zip(worker.model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    worker.backward(part)
    return [parameter.grad.clone() for parameter in worker.model.parameters()]


def updates(trial):
    """What the coordinator made of what reached it; a push's key has its number among its worker's."""
    coordinator = Coordinator(sync=trial.scheme.sync, load=trial.scheme.load, problem=PROBLEM, length=SAMPLES)
    numbers = [0, 0, 0]
    for event in trial.events.kept:
        worker, kind, commands = getattr(event, "worker", None), event.kind, ()
        if kind == "join":
            coordinator.join(worker)
        elif kind == "begin":
            commands = coordinator.begin(worker, event.number, event.epoch, event.at, ahead=event.ahead)
        elif kind == "push":
            key, numbers[worker] = (worker, 0, numbers[worker]), numbers[worker] + 1
            row = tuple(event.row)
            arrival = Arrival(key, event.claim, event.pulled, event.samples, event.units, row)
            commands = coordinator.push(arrival, event.at)
        elif kind in ("rest", "stop", "leave"):
            commands = getattr(coordinator, kind)(worker, event.at)
        yield from (command for command in commands if isinstance(command, Apply))

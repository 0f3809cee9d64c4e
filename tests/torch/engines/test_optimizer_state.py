"""The options that go with a push: those that the user's optimizer has at that moment."""

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.torch.engines.describe import OptimizerState, describe, layout_of
from evenstep.worker.servers.link import ServerLink


def state_of(**options):
    """An optimizer with these options, and what a worker knows of it."""
    parameters = {"weight": torch.nn.Parameter(torch.zeros(3))}
    optimizer = torch.optim.Adam(parameters.values(), **options)
    layout = layout_of(parameters.items(), [optimizer])
    link = ServerLink(0, lambda shard: pytest.fail("nobody connects"), 1, timeout_seconds=1.0)
    return optimizer, OptimizerState(link, optimizer, describe(optimizer), parameters, layout.shards(1))


def test_another_value_of_an_option_is_seen():
    optimizer, state = state_of(lr=0.1)
    state.options()
    optimizer.param_groups[0]["lr"] = 0.05
    assert [each["lr"] for each in state.options()] == [0.05]


@pytest.mark.parametrize("write", [lambda lr: lr.fill_(0.05), lambda lr: lr.mul_(0.5)])
def test_a_learning_rate_that_is_written_in_place_is_seen(write):
    optimizer, state = state_of(lr=torch.tensor(0.1), foreach=False)
    state.options()
    write(optimizer.param_groups[0]["lr"])
    assert [each["lr"] for each in state.options()] == [pytest.approx(0.05)]


def test_a_pair_that_is_written_in_place_is_seen():
    optimizer, state = state_of(lr=0.1)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    state.options()
    optimizer.param_groups[0]["betas"][0] = 0.5
    assert [each["betas"] for each in state.options()] == [(0.5, 0.99)]


def test_a_group_that_is_added_later_is_refused():
    optimizer, state = state_of(lr=0.1)
    state.options()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="add all groups"):
        state.options()

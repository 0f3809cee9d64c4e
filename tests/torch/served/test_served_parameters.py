"""Gradients as a message: whatever their sizes, and wherever they lie."""

import math

import pytest
import torch

from evenstep.tensors.messages import parameter_views
from evenstep.torch.engines.describe import layout_of
from evenstep.torch.engines.served_parameters import ServedParameters
from evenstep.worker.servers.link import ServerLink

SIZES = ((3,), (300, 300), (0,), (250, 200), (50_000,), (7,), (2**19 + 1,), (5, 5))
"""Small ones, large ones, and neighbours that are large together."""


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def served(request):
    """Parameters with gradients, and a function that has them put: the bytes that would be sent, and the norm."""
    torch.manual_seed(3)
    dtypes = [torch.float32] * 5 + [torch.bfloat16] * 2 + [torch.float64]
    parameters = {
        f"p{number}": torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        for number, (size, dtype) in enumerate(zip(SIZES, dtypes, strict=True))
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    layout = layout_of(parameters.items(), [torch.optim.SGD(parameters.values(), lr=1.0)]).shards(1)[0]
    link = ServerLink(0, lambda shard: pytest.fail("nobody connects"), 1, timeout_seconds=1.0)
    link.incarnation = 0
    link.shards[0].take_place((), layout.nbytes, 0)
    side = ServedParameters(parameters, [layout], link, waits=request.param)

    def put():
        norm = side.put_gradients()
        shard = link.shards[0]
        pieces = [shard.gradients] if shard.payload is None else shard.payload
        return b"".join(map(bytes, pieces)), norm

    return parameters, layout, put


def _expected(parameters, layout):
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec, view in zip(layout.parameters, parameter_views(layout, message), strict=True):
        if parameters[spec.name].grad is not None:
            view.copy_(parameters[spec.name].grad)
    return bytes(message.numpy())


def _norm(parameters):
    wide = [each.grad.double().flatten() for each in parameters.values() if each.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(wide)))


def test_a_message_has_every_gradient_in_its_place_and_the_norm_is_of_all(served):
    parameters, layout, put = served
    for _ in range(2):
        content, norm = put()
        assert content == _expected(parameters, layout)
        assert norm == pytest.approx(_norm(parameters), rel=1e-5)


def test_gradients_that_are_missing_or_lie_otherwise_are_put_all_the_same(served):
    parameters, layout, put = served
    put()
    parameters["p0"].grad = parameters["p4"].grad = parameters["p6"].grad = None
    parameters["p1"].grad = parameters["p1"].grad.t()
    parameters["p3"].grad = parameters["p3"].grad.t().contiguous().t()
    content, norm = put()
    assert content == _expected(parameters, layout)
    assert norm == pytest.approx(_norm(parameters), rel=1e-5)


@pytest.mark.parametrize("name", ["p0", "p1", "p4", "p6", "p7"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_number_that_is_not_finite_shows_in_the_norm(served, name, value):
    parameters, _, put = served
    parameters[name].grad.view(-1)[-1] = value
    assert not math.isfinite(put()[1])


def test_squares_that_are_too_large_for_their_type_make_no_norm_infinite(served):
    parameters, _, put = served
    parameters["p1"].grad[0, 0] = 1e30
    parameters["p6"].grad[0] = -1e30
    assert put()[1] == pytest.approx(math.sqrt(2) * 1e30, rel=1e-2)

"""Large gradients are weighed once, in their bucket or on the way into it, whatever becomes of the bucket."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from evenstep.torch.engines import large_gradients
from evenstep.torch.engines.weighting import GradientWeight

WEIGHT = 0.375


class Bucket:
    """Of all gradients of a model, as DistributedDataParallel hands it to a communication hook."""

    def __init__(self, parameters):
        self._parameters = parameters
        self._buffer = torch.zeros(sum(each.numel() for each in parameters))

    def index(self):
        return 0

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        pieces = self._buffer.split([each.numel() for each in self._parameters])
        return [piece.view_as(each) for piece, each in zip(pieces, self._parameters, strict=True)]

    def collect(self):
        """Copy the gradients that are not in the bucket into it."""
        for parameter, view in zip(self._parameters, self.gradients(), strict=True):
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad.detach())
            parameter.grad = view


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(large_gradients, "MIN_ELEMENTS", 6)
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def backward(model, weight, bucket, *, settled=True, create_graph=False):
    """A backward pass, weighed; returns the gradients unweighed and as they are in the bucket."""
    model.zero_grad()
    weight.begin(synchronises=False)
    model(torch.arange(6.0).view(2, 3)).square().sum().backward()
    plain = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()
    weight.begin(synchronises=True)
    if not settled:
        weight.leave()
    model(torch.arange(6.0).view(2, 3)).square().sum().backward(create_graph=create_graph)
    bucket.collect()
    weight.apply(bucket)
    return plain, bucket.buffer()


class Replica:
    """The part of DistributedDataParallel that is asked here, which needs a process group."""

    static_graph = False


@pytest.fixture
def replica():
    return Replica()


@pytest.fixture
def weight(model, replica):
    weight = GradientWeight(model.parameters())
    weight.weigh_on_the_way(replica)
    weight.set(WEIGHT)
    return weight


def known_bucket(model, weight):
    """A bucket that has had two backward passes, from which on gradients are weighed on their way into it."""
    bucket = Bucket(list(model.parameters()))
    for _ in range(2):
        backward(model, weight, bucket)
    return bucket


def in_bucket_when_hooks_ran(model):
    """The storage in which the gradient of the large parameter was found after backward."""
    return model.weight.grad.untyped_storage().data_ptr()


def test_every_gradient_is_weighed_once_before_and_after_the_buckets_are_known_and_replaced(model, weight):
    first, second = (Bucket(list(model.parameters())) for _ in range(2))
    for bucket in (first, first, first, second, second):
        plain, found = backward(model, weight, bucket)
        assert torch.equal(found, plain * WEIGHT)


def test_a_large_gradient_comes_into_its_bucket_weighed(model, weight):
    bucket = known_bucket(model, weight)
    model.zero_grad()
    weight.begin(synchronises=True)
    model(torch.ones(1, 3)).sum().backward()
    assert in_bucket_when_hooks_ran(model) == bucket.buffer().untyped_storage().data_ptr()
    assert torch.equal(model.weight.grad, torch.full((2, 3), WEIGHT))
    assert torch.equal(model.bias.grad, torch.ones(2))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "case", ["weight not settled", "gradient of a gradient", "later hook of the script", "static graph"]
)
def test_a_gradient_that_may_still_change_is_weighed_in_its_bucket(model, weight, replica, case):
    bucket = known_bucket(model, weight)
    found_outside = []
    replica.static_graph = case == "static graph"
    if case == "later hook of the script":
        model.weight.register_post_accumulate_grad_hook(lambda each: found_outside.append(each.grad.clone()))
    with torch.enable_grad():
        plain, found = backward(
            model, weight, bucket, settled=case != "weight not settled", create_graph=case == "gradient of a gradient"
        )
    assert torch.equal(found, plain * WEIGHT)
    assert all(torch.equal(each.flatten(), plain[:6]) for each in found_outside)


def test_a_backward_that_failed_half_way_leaves_nothing_weighed(model, weight):
    bucket = known_bucket(model, weight)
    model.zero_grad()
    weight.begin(synchronises=True)
    model(torch.ones(1, 3)).sum().backward()  # Its bucket is never sent.
    plain, found = backward(model, weight, bucket, settled=False)
    assert torch.equal(found, plain * WEIGHT)


def test_a_weight_that_changes_during_backward_counts_for_every_gradient(model, weight):
    bucket = known_bucket(model, weight)
    model.zero_grad()
    weight.begin(synchronises=True)
    model(torch.ones(1, 3)).sum().backward()
    weight.set(WEIGHT / 2)
    bucket.collect()
    weight.apply(bucket)
    assert torch.equal(bucket.buffer(), torch.full((8,), WEIGHT / 2))


def test_the_first_buckets_are_not_kept_in_memory(model, weight):
    bucket = Bucket(list(model.parameters()))
    backward(model, weight, bucket)
    kept = StorageWeakRef(bucket.buffer().untyped_storage())
    model.zero_grad()
    del bucket
    assert kept.expired()

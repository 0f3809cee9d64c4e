"""What is seen of a model's outputs in backward, and that nothing else notices."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from evenstep.torch.engines.output_watch import OutputWatch

SAMPLES, CLASSES = 40, 10


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def logits(*shape, dtype=torch.float32):
    """As a model's output: no leaf."""
    return (3 * torch.randn(*shape)).to(dtype).requires_grad_() * 1


def seen(output, loss, **outputs):
    watch = OutputWatch()
    watch.watch(outputs or output)
    loss.backward()
    return watch.take()


def expected(output, truth):
    """By the definition, of logits with their classes on the last axis."""
    output = output.detach().float().flatten(0, -2)
    gradient = output.softmax(1) - torch.nn.functional.one_hot(truth.flatten(), output.shape[1])
    return float(gradient.abs().sum(1).mean()), float((gradient * output).sum() / gradient.abs().sum())


@pytest.mark.parametrize("part", [torch.chunk, torch.tensor_split])
def test_of_several_outputs_some_may_get_no_gradient(part):
    layer = torch.nn.Linear(4, 2 * CLASSES)
    used, unused = part(layer(torch.randn(SAMPLES, 4)), 2, dim=1)
    truth = torch.randint(CLASSES, (SAMPLES,))
    found = seen((used, unused), cross_entropy(used, truth))
    assert (found.error, found.excess) == pytest.approx(expected(used, truth), rel=1e-4)


def test_an_odd_output_makes_no_forward_pass_fail():
    @dataclass
    class Output:
        logits: torch.Tensor

    output = Output(logits(SAMPLES, CLASSES))
    del output.logits
    OutputWatch().watch(output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_seen_as_the_definition_has_them(dtype):
    output, truth = logits(SAMPLES, CLASSES, dtype=dtype), torch.randint(CLASSES, (SAMPLES,))
    assert seen(output, cross_entropy(output.float(), truth)) == pytest.approx(expected(output, truth), rel=1e-2)


def test_other_outputs_and_losses_are_not_counted():
    output = logits(SAMPLES, CLASSES)
    assert seen(output, mse_loss(output, torch.randn(SAMPLES, CLASSES))) is None
    output = logits(SAMPLES, CLASSES)
    assert seen(output.sum(), output.sum()) is None
    assert seen(output.detach(), logits(1).sum()) is None


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    names: list[str]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, output: (loss, [output, None]),
        lambda loss, output: {"loss": loss, "logits": output, "labels": torch.arange(3)},
        lambda loss, output: Output(loss, output, ["a"]),
    ],
)
def test_outputs_are_found_in_what_a_model_returns(wrap):
    output, truth = logits(SAMPLES, CLASSES), torch.randint(CLASSES, (SAMPLES,))
    loss = cross_entropy(output, truth)
    watch = OutputWatch()
    watch.watch(wrap(loss, output))
    loss.backward()
    assert watch.take() == pytest.approx(expected(output, truth), rel=1e-5)


def test_several_passes_are_averaged_and_taken_once():
    watch, truth = OutputWatch(), torch.randint(CLASSES, (SAMPLES,))
    errors = []
    for _ in range(3):
        output = logits(SAMPLES, CLASSES)
        watch.watch(output)
        cross_entropy(output, truth).backward()
        errors.append(expected(output, truth)[0])
    assert watch.take().error == pytest.approx(sum(errors) / 3, rel=1e-5)
    assert watch.take() is None


@pytest.mark.parametrize(
    ("shape", "classes_axis"),
    [((300_000, 2), 1), ((4, 3000, 50), 2), ((1, 3000, 50), 2), ((3, 20, 60, 61), 1)],
)
def test_large_outputs_are_looked_at_in_part(shape, classes_axis):
    output = logits(*shape)
    last = output.movedim(classes_axis, -1)
    truth = torch.randint(shape[classes_axis], last.shape[:-1])
    wrong = seen(output, cross_entropy(last.reshape(-1, shape[classes_axis]), truth.flatten()))
    assert wrong == pytest.approx(expected(last, truth), rel=0.1, abs=0.05)


def test_a_loss_scale_is_not_taken_for_an_error():
    output, truth = logits(SAMPLES, CLASSES, dtype=torch.float16), torch.randint(CLASSES, (SAMPLES,))
    assert seen(output, cross_entropy(output.float(), truth)) is None


def test_what_is_changed_in_place_afterwards_is_as_it_was():
    output, truth = logits(SAMPLES, CLASSES), torch.randint(CLASSES, (SAMPLES,))
    right = expected(output, truth)
    watch = OutputWatch()
    watch.watch(output)
    cross_entropy(output, truth).backward()
    with torch.no_grad():
        output.zero_()
    assert watch.take() == pytest.approx(right, rel=1e-5)


def test_gradients_are_the_same_and_no_graph_is_kept():
    weight, inputs, truth = torch.randn(5, CLASSES), torch.randn(SAMPLES, 5), torch.randint(CLASSES, (SAMPLES,))
    gradients = []
    for watch in (None, OutputWatch()):
        parameter = weight.clone().requires_grad_()
        output = inputs @ parameter
        if watch is not None:
            watch.watch(output)
        (gradient,) = torch.autograd.grad(cross_entropy(output, truth), parameter, create_graph=watch is not None)
        gradients.append(gradient.detach())
        kept = weakref.ref(output)
        del output, gradient
        gc.collect()
        assert kept() is None
    assert torch.equal(*gradients)
    # A pass whose backward never comes.
    watch.watch(inputs @ parameter)
    watch.forget()


def test_nothing_odd_fails_the_script():
    watch, circle = OutputWatch(), []
    circle.append(circle)
    watch.watch(circle)
    watch.watch(Output)
    watch.watch((torch.zeros(3, 4, requires_grad=True), torch.zeros(0, 4, requires_grad=True) * 1, "text", 3))
    with pytest.warns(UserWarning, match="CSR"):
        sparse = torch.eye(3).to_sparse_csr().requires_grad_() * 1
    watch.watch(sparse)
    output = logits(2, 3) * torch.nan
    watch.watch(output)
    cross_entropy(output, torch.tensor([0, 1])).backward()
    assert watch.take() is None

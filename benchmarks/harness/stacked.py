"""Small networks whose runs are trained side by side: weights of shape [runs, parameters], one gradient for all.

Runs share samples and the order of events, and differ in their rates and rules.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from harness import tasks


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A task and a network for it.

    Attributes:
        shapes: Of each parameter, with the fan-in by whose root its first weights are bounded (0: they are zeros).
        scores: Of a network whose parameters have a leading axis of runs, for inputs that all runs share.
        measure: `accuracy` in per cent, or `loss` in nats.
    """

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    shapes: tuple[tuple[tuple[int, ...], int], ...]
    scores: object
    measure: str
    source: str

    def held_out(self, part, parts=5):
        """The same task on the rest of the training data, tested on this part of it, on as many rows as before."""
        own = torch.arange(len(self.train[1])) % parts == part
        test = tuple(each[own][: len(self.test[1])] for each in self.train)
        return replace(self, train=tuple(each[~own] for each in self.train), test=test)

    def first(self, seed):
        """The first weights, of shape [parameters]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(
            [
                ((torch.rand(shape, generator=generator) * 2 - 1) / fan**0.5 if fan else torch.zeros(shape)).flatten()
                for shape, fan in self.shapes
            ]
        )

    def gradient(self, weights, rows):
        """Of the mean loss on these rows, of each run."""
        weights = weights.detach().requires_grad_()
        self._losses(weights, self.train[0][rows], self.train[1][rows]).sum().backward()
        return weights.grad

    @torch.no_grad()
    def tested(self, weights):
        """What is measured on the test data, of each run; NaN stays NaN."""
        inputs, truth = self.test
        if self.measure == "loss":
            return self._losses(weights, inputs, truth).tolist()
        right = self.scores(self._parts(weights), inputs).argmax(dim=-1) == truth
        return (100 * right.double().mean(dim=-1)).tolist()

    def _losses(self, weights, inputs, truth):
        scores = self.scores(self._parts(weights), inputs).flatten(1, -2)
        truth = truth.flatten().expand(len(scores), -1)
        return (torch.logsumexp(scores, dim=-1) - scores.gather(-1, truth[..., None])[..., 0]).mean(dim=-1)

    def _parts(self, weights):
        sizes = [torch.Size(shape).numel() for shape, _ in self.shapes]
        return [
            part.unflatten(-1, shape)
            for part, (shape, _) in zip(weights.split(sizes, dim=-1), self.shapes, strict=True)
        ]


def _of_one_layer(task, name):
    inputs = task.train[0].shape[1]
    return Stacked(
        name=name, train=task.train, test=task.test, measure="accuracy", source=task.source, scores=_one_layer,
        shapes=(
            ((inputs, task.hidden), inputs), ((1, task.hidden), inputs),
            ((task.hidden, task.classes), task.hidden), ((1, task.classes), task.hidden),
        ),
    )  # fmt: skip


def _one_layer(parts, inputs):
    hidden, hidden_bias, output, output_bias = parts
    return torch.relu(inputs @ hidden + hidden_bias) @ output + output_bias


def digits():
    """Handwritten digits, one hidden layer."""
    return _of_one_layer(tasks.digits(), "digits")


def letters():
    """The next letter from the last two, one hidden layer."""
    return _of_one_layer(tasks.letters(), "letters")


def text(*, context=16, width=24, heads=2, train=6400, test=200):
    """A GPT of one block that reads letters: the next one after each of a stretch."""
    codes, source = tasks.letters_of_help()
    windows = np.lib.stride_tricks.sliding_window_view(codes, context + 1)
    taken = torch.from_numpy(windows[np.random.default_rng(0).permutation(len(windows))[: train + test]])
    inputs, truth, letters = taken[:, :-1], taken[:, 1:], len(tasks.LETTERS)
    shapes = {
        "letters": ((letters, width), 1), "places": ((context, width), 1), "scale": ((1, 1, width), 0),
        "attention": ((width, 3 * width), width), "out": ((width, width), width), "scale of hidden": ((1, 1, width), 0),
        "hidden": ((width, 4 * width), width), "hidden bias": ((1, 4 * width), 0),
        "back": ((4 * width, width), 4 * width), "scale of scores": ((1, 1, width), 0),
        "scores": ((width, letters), width), "scores bias": ((1, letters), 0),
    }  # fmt: skip
    return Stacked(
        name="text", train=(inputs[:train], truth[:train]), test=(inputs[train:], truth[train:]), measure="loss",
        source=source, shapes=tuple(shapes.values()), scores=_gpt(context, heads),
    )  # fmt: skip


def _gpt(context, heads):
    later = torch.full((context, context), -torch.inf).triu(1)

    def normed(x, scale):
        # Scales are kept less 1, so that they are zeros at first.
        x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * (1 + scale)

    def product(x, matrix):
        return torch.bmm(x.flatten(1, 2), matrix).unflatten(1, x.shape[1:3])

    def scores(parts, inputs):
        letters, places, scale, attention, out, scale_hidden, hidden, hidden_bias, back, scale_scores, last, bias = (
            parts
        )
        # Of shape [runs, stretches, places, width].
        x = letters[:, inputs] + places[:, None]
        of_heads = product(normed(x, scale), attention).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
        query, key, value = of_heads
        weights = (query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5 + later).softmax(dim=-1)
        x = x + product((weights @ value).transpose(2, 3).flatten(-2), out)
        x = x + product(torch.relu(product(normed(x, scale_hidden), hidden) + hidden_bias[:, None]), back)
        return product(normed(x, scale_scores), last) + bias[:, None]

    return scores

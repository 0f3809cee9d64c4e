"""Models of the kinds that people write, in MXNet's Gluon."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon.utils import clip_global_norm

import evenstep.mxnet
from support.frameworks.kinds import CLASSES, SCHEME, SLICES, STEPS, WIDTH, WORDS, factors, samples
from support.frameworks.task import GLOBAL, WORKERS

nn = gluon.nn


class Net(gluon.Block):
    """Its forward gives the logits, and with several outputs values before them."""

    def __init__(self, kind, odd):
        super().__init__()
        self.kind = kind
        width = 9 if odd == "shape" else WIDTH
        made = {
            "conv": lambda: (nn.Conv2D(1, 3, in_channels=2), 36),
            "recurrent": lambda: (gluon.rnn.LSTM(width, layout="NTC", input_size=WIDTH), width),
            "attention": lambda: (nn.Dense(3 * width, flatten=False, in_units=WIDTH), width),
            "embedding": lambda: (nn.Embedding(WORDS, width), width * STEPS),
            "masked": lambda: (nn.Embedding(WORDS, width), width),
            "dense over time": lambda: (nn.Dense(width, "tanh", flatten=False, in_units=WIDTH), width),
            "several inputs and outputs": lambda: (nn.Dense(width, "tanh", in_units=WIDTH + STEPS), width),
        }
        with self.name_scope():
            self.first, units = made[kind]()
            self.last = nn.Dense(CLASSES, flatten=False, in_units=units)
            self.values = nn.Dense(1, in_units=units) if kind == "several inputs and outputs" else None

    def forward(self, *inputs):
        hidden = self.first(mx.nd.concat(*inputs, dim=1) if self.values else inputs[0])
        if self.kind == "recurrent":
            hidden = hidden[:, -1]
        elif self.kind == "attention":
            queries, keys, values = mx.nd.split(hidden, 3, axis=2)
            hidden = mx.nd.batch_dot(mx.nd.softmax(mx.nd.batch_dot(queries, keys, transpose_b=True)), values).mean(1)
        elif self.kind == "dense over time":
            hidden = hidden.mean(1)
        elif self.kind in ("conv", "embedding"):
            hidden = hidden.flatten()
        return (self.values(hidden), self.last(hidden)) if self.values else self.last(hidden)


def made(job, kvstore, odd=None):
    net = Net(job.kind, odd)
    net.initialize()
    if odd == "dtype":
        net.cast("float64")
    generator = np.random.default_rng(1)
    for each in net.collect_params().values():
        each.set_data(mx.nd.array(generator.normal(size=each.shape) / 3, dtype=each.dtype))
    adam = job.kind == "embedding" or odd == "optimizer"
    name, options = ("adam", {"learning_rate": 0.01}) if adam else ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    return net, gluon.Trainer(net.collect_params(), name, options, kvstore=kvstore)


def arrays(kind):
    *inputs, labels = samples(kind)
    inputs = [inputs[0].transpose(0, 3, 1, 2)] if kind == "conv" else inputs
    return [each.astype("float32") for each in (*inputs, labels)]


def backward(net, batch, kept, weigh_by=None):
    *inputs, labels = batch
    counts = labels >= 0
    with autograd.record():
        if net.values:
            *inputs, values = inputs
            about, logits = net(*inputs)
            losses = mx.nd.square(about - values).mean(1)
        else:
            logits, losses = net(*inputs), 0
        entropies = -mx.nd.pick(mx.nd.log_softmax(logits), mx.nd.maximum(labels, 0)) * counts
        losses = losses + entropies.reshape((len(labels), -1)).sum(1)
        loss = (losses * mx.nd.array(kept)).sum() / counts.sum()
    loss.backward()
    if weigh_by is not None:
        weigh_by(counts.sum().asscalar())


def weights_of(net):
    return [each.data().asnumpy() for each in net.collect_params().values()]


def train(job):
    net, trainer = made(job, "dist_sync", job.odd)
    data = gluon.data.ArrayDataset(*arrays(job.kind))
    loader = gluon.data.DataLoader(data, batch_size=GLOBAL // WORKERS)
    trainer, loader = evenstep.mxnet.prepare(trainer, loader, SCHEME)
    for iteration, batch in enumerate(loader):
        share = loader.current
        kept = factors(share.indices, iteration, np.nan if job.faulty else None)
        backward(net, batch, kept, loader.weigh_by if job.kind == "masked" else None)
        with pytest.raises(evenstep.ConfigError, match=r"^clip_global_norm would clip this worker's gradient before"):
            clip_global_norm([each.grad() for each in net.collect_params().values()], 1.0)
        trainer.step(1)
        yield share.indices[: share.samples], share.sizes
    loader.close()
    yield weights_of(net)


def alone(job):
    net, trainer = made(job, None)
    data = arrays(job.kind)
    for iteration, at in enumerate(SLICES):
        backward(net, [mx.nd.array(each[at]) for each in data], factors(at, iteration, 0.0 if job.faulty else None))
        trainer.step(1)
    return weights_of(net)

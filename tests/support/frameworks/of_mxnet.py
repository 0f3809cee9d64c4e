"""MXNet: a plain loop of Gluon around `evenstep.mxnet.prepare`."""

import os
import signal
import subprocess
import sys

import mxnet as mx
from mxnet import autograd, gluon

import evenstep.mxnet
from evenstep.launch.supervisor import signal_when_parent_dies
from support.frameworks.task import (
    EPOCHS,
    GLOBAL,
    HIDDEN,
    INPUTS,
    KINDS,
    MOMENTUM,
    RATE,
    SLICES,
    WORKERS,
    data,
    first_weights,
)

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def join(rank, addresses):
    host, port = addresses[0].split(":")
    os.environ |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
    os.environ |= {"DMLC_NUM_WORKER": str(len(addresses)), "DMLC_NUM_SERVER": "1", "DMLC_NODE_HOST": host}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(addresses))}
    if rank == 0:
        for role in ("scheduler", "server"):
            subprocess.Popen(
                [sys.executable, "-c", "import mxnet"],
                env={**os.environ, "DMLC_ROLE": role},
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: signal_when_parent_dies(signal.SIGKILL),
            )
    os.environ["DMLC_ROLE"] = "worker"


def made(job, kvstore):
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(HIDDEN, "tanh", in_units=INPUTS, dtype=job.dtype))
    net.add(gluon.nn.Dense(KINDS, in_units=HIDDEN, dtype=job.dtype))
    net.initialize()
    for parameter, first in zip(net.collect_params().values(), first_weights(job.dtype), strict=True):
        parameter.set_data(mx.nd.array(first.T, dtype=job.dtype))
    options = {"learning_rate": RATE, "momentum": MOMENTUM}
    return net, gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore)


def backward(net, inputs, labels):
    with autograd.record():
        loss = LOSS(net(inputs), labels)
    loss.backward()


def weights_of(net):
    return [each.data().asnumpy().T for each in net.collect_params().values()]


def train(job):
    inputs, labels = (mx.nd.array(each, dtype=each.dtype) for each in data(job.dtype))
    net, trainer = made(job, "dist_sync")
    dataset = gluon.data.ArrayDataset(inputs, labels)
    loader = gluon.data.DataLoader(dataset, batch_size=GLOBAL // WORKERS)
    trainer, loader = evenstep.mxnet.prepare(trainer, loader, job.scheme)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            backward(net, inputs, labels)
            trainer.step(len(labels))
            yield loader.current.indices[: loader.current.samples], loader.current.sizes
    loader.close()
    yield weights_of(net)


def gradients(job):
    net, _ = made(job, None)

    def at(weights, inputs, labels):
        for parameter, weight in zip(net.collect_params().values(), weights, strict=True):
            parameter.set_data(mx.nd.array(weight.T, dtype=job.dtype))
        backward(net, mx.nd.array(inputs, dtype=job.dtype), mx.nd.array(labels))
        return [each.grad().asnumpy().T / len(labels) for each in net.collect_params().values()]

    return at


def alone(job):
    net, trainer = made(job, None)
    inputs, labels = (mx.nd.array(each, dtype=each.dtype) for each in data(job.dtype))
    for _ in range(EPOCHS):
        for batch in map(mx.nd.array, SLICES):
            backward(net, inputs[batch], labels[batch])
            trainer.step(len(batch))
    return weights_of(net)

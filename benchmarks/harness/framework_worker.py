"""One worker of frameworks.py: python framework_worker.py FRAMEWORK ITERATIONS, started by evenstep run."""

import os
import sys

import numpy as np

BATCH, WORKERS, FEATURES, HIDDEN, KINDS = 256, 4, 16, 64, 4
RANK, COUNT = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def data(iterations):
    """Random inputs and labels."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(BATCH * iterations, FEATURES)).astype(np.float32)
    return inputs, generator.integers(KINDS, size=len(inputs)).astype(np.int32)


def torch_(inputs, labels):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import evenstep

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, KINDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels).long()), BATCH // COUNT)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def jax_(inputs, labels):
    import jax

    import evenstep.jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(num_processes=COUNT, process_id=RANK)
    generator = np.random.default_rng(1)
    weights = [generator.normal(size=shape, scale=0.1) for shape in ((FEATURES, HIDDEN), (HIDDEN, KINDS))]
    weights = [each.astype(np.float32) for each in weights]

    @jax.jit
    @jax.grad
    def gradients_of(weights, x, y, mask):
        logits = jax.nn.relu(x @ weights[0]) @ weights[1]
        chosen = jax.numpy.take_along_axis(logits, y[:, None], 1)[:, 0]
        return jax.numpy.mean(jax.nn.logsumexp(logits, 1) - chosen, where=mask)

    session = evenstep.jax.Session(weights=weights, data=(inputs, labels), global_batch_size=BATCH, pad=16)
    for (x, y), mask in session.epoch():
        gradients = session.mean(gradients_of(weights, x, y, mask))
        weights = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def tensorflow_(inputs, labels):
    import keras

    import evenstep.tensorflow

    evenstep.tensorflow.init()
    layers = [keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(KINDS)]
    model, optimizer = keras.Sequential([keras.Input([FEATURES]), *layers]), keras.optimizers.SGD(0.1)
    model, optimizer, dataset = evenstep.tensorflow.prepare(model, optimizer, (inputs, labels), global_batch_size=BATCH)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(dataset, verbose=0)


def mxnet_(inputs, labels):
    import mxnet as mx
    from mxnet import autograd, gluon

    import evenstep.mxnet

    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(HIDDEN, "relu", in_units=FEATURES), gluon.nn.Dense(KINDS, in_units=HIDDEN))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    dataset = gluon.data.ArrayDataset(inputs, labels)
    loader = gluon.data.DataLoader(
        dataset,
        BATCH // COUNT,
        batchify_fn=lambda rows: [mx.nd.array(np.stack(each)) for each in zip(*rows, strict=True)],
    )
    trainer, loader = evenstep.mxnet.prepare(trainer, loader)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(y))


if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_"](*data(int(sys.argv[2])))

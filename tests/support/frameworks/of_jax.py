"""JAX: a loop with Optax around `evenstep.jax.Session`."""

import jax
import optax

import evenstep.jax
from support.frameworks.task import EPOCHS, GLOBAL, MOMENTUM, RATE, SLICES, data, first_weights

PAD = 4
OPTIMIZER = optax.sgd(RATE, momentum=MOMENTUM)


def join(rank, addresses):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(addresses[0], len(addresses), rank)


@jax.jit
@jax.value_and_grad
def loss_of(weights, inputs, labels, mask=None):
    hidden = jax.numpy.tanh(inputs @ weights[0] + weights[1])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ weights[2] + weights[3], labels)
    return jax.numpy.mean(losses, where=mask)


@jax.jit
def stepped(weights, state, gradients):
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state


def train(job):
    weights = list(map(jax.numpy.asarray, first_weights(job.dtype)))
    state = OPTIMIZER.init(weights)
    session = evenstep.jax.Session(
        job.scheme,
        weights=(weights, state),
        data=data(job.dtype),
        global_batch_size=GLOBAL,
        pad=PAD,
        shuffle=False,
    )
    for epoch in range(EPOCHS):
        for (inputs, labels), mask in session.epoch(epoch):
            _, gradients = session.mean(loss_of(weights, inputs, labels, mask))
            weights, state = session.average(stepped(weights, state, gradients))
            yield session.share.indices[: session.share.samples], session.share.sizes
    session.close()
    yield jax.device_get(weights)


def gradients(job):
    return lambda weights, inputs, labels: loss_of(weights, inputs, labels)[1]


def alone(job):
    weights, (inputs, labels) = first_weights(job.dtype), data(job.dtype)
    state = OPTIMIZER.init(weights)
    for _ in range(EPOCHS):
        for batch in SLICES:
            _, gradients = loss_of(weights, inputs[batch], labels[batch])
            weights, state = stepped(weights, state, gradients)
    return jax.device_get(weights)

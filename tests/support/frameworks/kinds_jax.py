"""Models of the kinds that people write, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import evenstep.jax
from support.frameworks.kinds import CLASSES, SCHEME, SLICES, STEPS, WIDTH, WORDS, factors, samples
from support.frameworks.task import GLOBAL


def made(kind, odd=None):
    """Weights, and the optimizer."""
    generator = np.random.default_rng(1)
    width = 9 if odd == "shape" else WIDTH

    def floats(*shape):
        return jnp.asarray(generator.normal(size=shape) / np.sqrt(shape[0]), jnp.float64 if odd == "dtype" else "f4")

    several = kind == "several inputs and outputs"
    weights = {
        "conv": {"conv": floats(3, 3, 2, 1), "last": floats(36, CLASSES)},
        "recurrent": {"in": floats(WIDTH, width), "on": floats(width, width), "last": floats(width, CLASSES)},
        "attention": {name: floats(WIDTH, width) for name in "qkv"} | {"last": floats(width, CLASSES)},
        "embedding": {"words": floats(WORDS, width), "last": floats(width * STEPS, CLASSES)},
        "masked": {"words": floats(WORDS, width), "last": floats(width, CLASSES)},
        "dense over time": {"in": floats(WIDTH, width), "last": floats(width, CLASSES)},
        "several inputs and outputs": {"in": floats(WIDTH + STEPS, width), "values": floats(width, 1)}
        | {"last": floats(width, CLASSES)},
    }[kind]
    if odd == "optimizer":  # Its weights have another array.
        weights["more"] = floats(3)
    return weights, optax.adam(0.01) if kind == "embedding" else optax.sgd(0.1 if several else 0.2, momentum=0.9)


def hidden_of(kind, weights, inputs):
    if kind == "conv":
        dims = "NHWC", "HWIO", "NHWC"
        given = jax.lax.conv_general_dilated(inputs, weights["conv"], (1, 1), "VALID", dimension_numbers=dims)
        return jnp.tanh(given).reshape(len(inputs), -1)
    if kind == "recurrent":
        state = jnp.zeros((len(inputs), len(weights["on"])), "f4")
        for at in range(STEPS):
            state = jnp.tanh(inputs[:, at] @ weights["in"] + state @ weights["on"])
        return state
    if kind == "attention":
        queries, keys, values = (inputs @ weights[name] for name in "qkv")
        return (jax.nn.softmax(queries @ keys.swapaxes(1, 2)) @ values).mean(1)
    if kind in ("embedding", "masked"):
        vectors = weights["words"][inputs]
        return vectors.reshape(len(inputs), -1) if kind == "embedding" else vectors
    hidden = jnp.tanh(inputs @ weights["in"])
    return hidden.mean(1) if kind == "dense over time" else hidden


def loss_of(kind):
    @jax.jit
    @jax.value_and_grad
    def loss(weights, batch, kept):
        *inputs, labels = batch
        losses = sum(each.sum() * 0 for each in weights.values())
        if kind == "several inputs and outputs":
            one, two, values = inputs
            inputs = [jnp.concatenate([one, two], 1)]
        hidden = hidden_of(kind, weights, inputs[0])
        if kind == "several inputs and outputs":
            losses += jnp.square(hidden @ weights["values"] - values).mean(1)
        entropies = optax.softmax_cross_entropy_with_integer_labels(hidden @ weights["last"], jnp.maximum(labels, 0))
        losses += (entropies * (labels >= 0)).reshape(len(labels), -1).sum(1)
        return (losses * kept).sum() / (labels >= 0).sum()

    return loss


def train(job):
    weights, optimizer = made(job.kind, job.odd)
    data, state, loss = samples(job.kind), optimizer.init(weights), loss_of(job.kind)
    session = evenstep.jax.Session(SCHEME, weights=(weights, state), data=data, global_batch_size=GLOBAL, shuffle=False)
    for iteration, batch in enumerate(session.epoch()):
        kept = factors(session.share.indices, iteration, np.nan if job.faulty else None)
        if job.kind == "masked":
            session.weigh_by((batch[-1] >= 0).sum())
        _, gradients = session.mean(loss(weights, batch, kept))
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        yield session.share.indices[: session.share.samples], session.share.sizes
    session.close()
    yield jax.device_get(list(weights.values()))


def alone(job):
    weights, optimizer = made(job.kind)
    data, state, loss = samples(job.kind), optimizer.init(weights), loss_of(job.kind)
    for iteration, at in enumerate(SLICES):
        kept = factors(at, iteration, 0.0 if job.faulty else None)
        _, gradients = loss(weights, [each[at] for each in data], kept)
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
    return jax.device_get(list(weights.values()))

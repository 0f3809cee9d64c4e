"""TensorFlow: a loop with a traced step around what `evenstep.tensorflow.prepare` returns."""

import json
import os

from support.frameworks.task import EPOCHS, GLOBAL, HIDDEN, INPUTS, KINDS, MOMENTUM, RATE, SLICES, data, first_weights
from support.of_tensorflow import QUIET

os.environ |= QUIET

import keras
import numpy as np
import tensorflow as tf

import evenstep.tensorflow


def join(rank, addresses):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(config)
    evenstep.tensorflow.init()


def made(job):
    layers = [keras.layers.Dense(HIDDEN, "tanh", dtype=job.dtype), keras.layers.Dense(KINDS, dtype=job.dtype)]
    model = keras.Sequential([keras.Input([INPUTS], dtype=job.dtype), *layers])
    model.set_weights(first_weights(job.dtype))
    return model, keras.optimizers.SGD(RATE, momentum=MOMENTUM)


def stepping(model, optimizer):
    @tf.function(reduce_retracing=True)
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs, training=True))
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return step


def train(job):
    inputs, labels = data(job.dtype)
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        *made(job), (inputs, labels, np.arange(len(labels))), job.scheme, global_batch_size=GLOBAL, shuffle=False
    )
    step = stepping(model, optimizer)
    for _ in range(EPOCHS):
        for inputs, labels, indices in dataset:
            step(inputs, labels)
            yield indices[: dataset.current.samples], dataset.current.sizes
    dataset.close()
    yield model.get_weights()


def gradients(job):
    model, _ = made(job)

    @tf.function(reduce_retracing=True)
    def of_batch(inputs, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs, training=True))
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables)

    def at(weights, inputs, labels):
        model.set_weights(weights)
        return of_batch(inputs, labels)

    return at


def alone(job):
    model, optimizer = made(job)
    step, (inputs, labels) = stepping(model, optimizer), data(job.dtype)
    for _ in range(EPOCHS):
        for batch in SLICES:
            step(inputs[batch], labels[batch])
    return model.get_weights()

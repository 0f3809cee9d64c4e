"""Models of the kinds that people write, in Keras."""

import keras
import numpy as np
import tensorflow as tf

import evenstep.tensorflow
from support.frameworks.kinds import CLASSES, SCHEME, SLICES, STEPS, WIDTH, WORDS, factors, samples
from support.frameworks.task import GLOBAL

layers = keras.layers


def made(kind, odd=None):
    keras.utils.set_random_seed(1)
    if kind == "several inputs and outputs":
        one, two = keras.Input([WIDTH]), keras.Input([STEPS])
        joined = layers.Dense(16, "tanh")(layers.concatenate([one, two]))
        model = keras.Model([one, two], [layers.Dense(1)(joined), layers.Dense(CLASSES)(joined)])
    elif kind in ("embedding", "masked"):
        words = keras.Input([STEPS], dtype="int32")
        vectors = layers.Embedding(WORDS, WIDTH, mask_zero=kind == "masked")(words)
        vectors = vectors if kind == "masked" else layers.Flatten()(vectors)
        model = keras.Model(words, layers.Dense(CLASSES)(vectors))
    elif kind == "conv":
        middle = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
        model = keras.Sequential([keras.Input([WIDTH, WIDTH, 2]), *middle, layers.Dense(CLASSES)])
    else:
        steps = keras.Input([STEPS, WIDTH])
        hidden = {
            "recurrent": lambda: layers.LSTM(8)(steps),
            "attention": lambda: layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 4)(steps, steps)),
            "dense over time": lambda: layers.GlobalAveragePooling1D()(
                layers.Dense(9 if odd == "shape" else 8, "tanh", dtype="float64" if odd == "dtype" else None)(steps)
            ),
        }[kind]()
        model = keras.Model(steps, layers.Dense(CLASSES)(hidden))
    adam = kind == "embedding" or odd == "optimizer"
    return model, keras.optimizers.Adam(0.01) if adam else keras.optimizers.SGD(0.1, momentum=0.9)


def stepping(model, optimizer, kind, specs, weigh_by=None):
    """A step of a plain script; with `weigh_by` a loss over words says how many there are."""

    @tf.function(input_signature=[specs, tf.TensorSpec([None])])
    def step(batch, kept):
        *inputs, labels = batch
        with tf.GradientTape() as tape:
            if kind == "several inputs and outputs":
                *inputs, values = inputs
                about, logits = model(inputs, training=True)
                losses = tf.reduce_mean(tf.square(about - values), 1)
            else:
                logits, losses = model(inputs[0], training=True), 0.0
            counts = tf.cast(labels >= 0, tf.float32)
            entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits) * counts
            losses += tf.reduce_sum(tf.reshape(entropies, [tf.shape(kept)[0], -1]), 1)
            if weigh_by is not None:
                weigh_by(tf.reduce_sum(counts))
            loss = tf.reduce_sum(losses * kept) / tf.reduce_sum(counts)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    return step


def train(job):
    model, optimizer = made(job.kind, job.odd)
    data = samples(job.kind)
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        model, optimizer, (*data, np.arange(len(data[0]))), SCHEME, global_batch_size=GLOBAL, shuffle=False
    )
    weigh_by = dataset.weigh_by if job.kind == "masked" else None
    step = stepping(model, optimizer, job.kind, dataset.element_spec[:-1], weigh_by)
    for iteration, (*batch, indices) in enumerate(dataset):
        step(tuple(batch), factors(indices.numpy(), iteration, np.nan if job.faulty else None))
        yield indices[: dataset.current.samples], dataset.current.sizes
    dataset.close()
    yield model.get_weights()


def alone(job):
    model, optimizer = made(job.kind)
    data = samples(job.kind)
    specs = tuple(tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in data)
    step = stepping(model, optimizer, job.kind, specs)
    for iteration, at in enumerate(SLICES):
        step(tuple(each[at] for each in data), factors(at, iteration, 0.0 if job.faulty else None))
    return model.get_weights()

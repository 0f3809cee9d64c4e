"""What a worker with TensorFlow does in the tests: python -m support.tensorflow_jobs FOLDER"""

import itertools
import json
import pickle
import sys
import threading
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import evenstep.tensorflow
from evenstep.schemes import Scheme
from evenstep.tensorflow.source import Source
from evenstep.tensorflow.workers import read_place
from evenstep.testing.scripted import Scripted
from support.guard import GUARD_SECONDS

WORKERS = evenstep.tensorflow.init()
LENGTH, GLOBAL, EPOCHS = 150, 24, 3
CHANGING = Scheme(name="scripted", load=Scripted(seed=11))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(kind="float32"):
    """Inputs, labels, and the index of each sample."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(LENGTH, 8))
    labels = (inputs @ generator.normal(size=(8, 4))).argmax(1)
    return inputs.astype(kind), labels.astype(np.int32), np.arange(LENGTH)


def made(kind="float32", seed=None):
    """A model and its optimizer; its weights are those of the seed, or of this worker's own."""
    keras.utils.set_random_seed(10 + WORKERS.rank if seed is None else seed)
    layers = [keras.layers.Dense(16, activation="tanh", dtype=kind), keras.layers.Dense(4, dtype=kind)]
    return keras.Sequential([keras.Input([8], dtype=kind), *layers]), keras.optimizers.SGD(0.1, momentum=0.9)


def stepping(model, optimizer):
    """A plain script's step, which is traced once."""
    spec = [tf.TensorSpec([None, 8], model.inputs[0].dtype), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=spec)
    def step(inputs, labels):
        traces.append(1)
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            # Keras's losses compute in float32.
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    traces = []
    return step, traces


def loop(scheme, kind="float32", seed=None, stop_after=None, run_dir=None):
    """A loop as in any script; after `stop_after` iterations everything is made again, and goes on from the state."""

    def prepared(seed):
        return evenstep.tensorflow.prepare(
            *made(kind, seed), data(kind), scheme, global_batch_size=GLOBAL, seed=5, run_dir=run_dir
        )

    model, optimizer, dataset = prepared(seed)
    step, traces = stepping(model, optimizer)
    taken = []
    while (epoch := dataset.next_epoch) < EPOCHS:
        for inputs, labels, indices in dataset:
            dataset.note(loss=step(inputs, labels))
            taken.append((epoch, indices.numpy()[: dataset.current.samples].tolist()))
            if len(taken) == stop_after:
                break
        if len(taken) == stop_after:
            state, weights, slots = (
                dataset.state_dict(),
                model.get_weights(),
                [each.numpy() for each in optimizer.variables],
            )
            dataset.close()
            stop_after = None
            model, optimizer, dataset = prepared(99)
            model.set_weights(weights)
            for variable, value in zip(optimizer.variables, slots, strict=True):
                variable.assign(value)
            dataset.load_state_dict(state)
            step, traces = stepping(model, optimizer)
    dataset.close()
    return {"weights": model.get_weights(), "taken": taken, "traces": len(traces), "steps": int(optimizer.iterations)}


def fit(scheme, seed=None, prefetched=False, **options):
    """Keras's own loop."""
    model, optimizer = made(seed=seed)
    inputs, labels, _ = data()
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        model, optimizer, (inputs, labels), scheme, global_batch_size=GLOBAL, seed=5
    )
    model.compile(optimizer, LOSS, metrics=["accuracy"], **options)
    batches, own = [], {}
    counted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (batches.append(batch), own.update(logs))
    )
    batches_of = dataset.prefetch(2) if prefetched else dataset
    history = model.fit(batches_of, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[counted])
    found = {"weights": model.get_weights(), "batches": len(batches), "next": dataset.next_epoch}
    dataset.close()
    return {**found, "own": own, "history": history.history}


def validated_by_first():
    """A fit of which only worker 0 validates, with a callback that rests on it."""
    model, optimizer = made(seed=1)
    inputs, labels, _ = data()
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        model, optimizer, (inputs, labels), "bsp", global_batch_size=GLOBAL
    )
    model.compile(optimizer, LOSS)
    slower = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=1e3)
    held_out = (inputs[:40], labels[:40])
    history = model.fit(
        dataset, epochs=2, verbose=0, callbacks=[slower], validation_data=None if WORKERS.rank else held_out
    )
    found = {"history": history.history, "rate": float(optimizer.learning_rate), "weights": model.get_weights()}
    return {**found, "true": model.evaluate(*held_out, batch_size=40, verbose=0)}


class Table:
    """Has a shape without being an array, as the datasets of Hugging Face do."""

    shape = (4, 1)

    def __len__(self):
        return 4

    def __getitem__(self, indices):
        return {"twice": 2 * indices}


def table():
    return Source(Table()).batch(np.array([3, 1]))["twice"].tolist()


def written(folder):
    """A fit whose callbacks write after each batch, files of all workers and of each."""
    model, optimizer = made(seed=1)
    inputs, labels, _ = data()
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        model, optimizer, (inputs, labels), "bsp", global_batch_size=GLOBAL
    )
    model.compile(optimizer, LOSS)
    saving = [
        keras.callbacks.ModelCheckpoint(f"{folder}/{name}.weights.h5", save_weights_only=True, save_freq=1)
        for name in ("all", f"own {WORKERS.rank}")
    ]
    backing = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1)
    callbacks = [*saving, backing, keras.callbacks.CSVLogger(f"{folder}/log.csv")]
    model.fit(dataset, epochs=2, verbose=0, callbacks=callbacks)
    weights = [each.copy() for each in model.get_weights()]
    for name in ("all", f"own {WORKERS.rank}"):
        model.load_weights(f"{folder}/{name}.weights.h5")
        assert all((one == other).all() for one, other in zip(weights, model.get_weights(), strict=True))
    return {}


def masked(ignored, alone=False):
    """A fit on words, of which a mask or a class of labels leaves some; weights, and the rate that a callback chose."""
    keras.utils.set_random_seed(1)
    generator = np.random.default_rng(1)
    words = generator.integers(1, 20, size=(LENGTH, 6))
    words[np.arange(6) >= generator.integers(1, 7, size=(LENGTH, 1))] = 0
    labels = np.where(words > 0, words % 3, -1 if ignored else 0)
    given = keras.Input([6], dtype="int64")
    vectors = keras.layers.Embedding(20, 4, mask_zero=not ignored)(given)
    model, optimizer = keras.Model(given, keras.layers.Dense(3)(vectors)), keras.optimizers.SGD(0.1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1 if ignored else None)
    if alone:
        model.compile(optimizer, loss)
        for indices in slices():
            model.train_on_batch(words[indices], labels[indices])
        return {"weights": model.get_weights()}
    model, optimizer, dataset = evenstep.tensorflow.prepare(
        model, optimizer, (words, labels), CHANGING, global_batch_size=GLOBAL, seed=5
    )
    model.compile(optimizer, loss)
    mapped = dataset.map(lambda words, labels: (words, labels))
    slower = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e-3, factor=1.0 - 1e-9)
    held_out = (words[:40], labels[:40])
    history = model.fit(mapped, epochs=EPOCHS, verbose=0, callbacks=[slower], validation_data=held_out)
    return {"weights": model.get_weights(), "history": history.history}


def sharded(partition=None):
    """What is said where each worker has a shard of its own."""
    shard = [each[WORKERS.rank :: 2] for each in data()[:2]]
    evenstep.tensorflow.prepare(*made(), shard, "bsp", global_batch_size=GLOBAL, partition=partition)


def slices():
    """The indices of the union batch of each iteration, for all epochs."""
    balancer = evenstep.Balancer("bsp", rank=0, workers=1, length=LENGTH, global_batch_size=GLOBAL, seed=5)
    for epoch in range(EPOCHS):
        for share in balancer.epoch(epoch):
            balancer.report(0.0)
            yield share.indices


def alone(kind="float32"):
    """The plain script in one process, from the weights that worker 0 has at first."""
    model, optimizer = made(kind, seed=10)
    step, _ = stepping(model, optimizer)
    inputs, labels, _ = data(kind)
    for indices in slices():
        step(inputs[indices], labels[indices])
    return {"weights": model.get_weights(), "steps": int(optimizer.iterations)}


def odd(scheme=None):
    """No tf.function, and gradients that are sparse, missing, and of two dtypes; None: alone."""
    keras.utils.set_random_seed(1)
    words = np.random.default_rng(1).integers(0, 20, size=(LENGTH, 3))
    given = keras.Input([3], dtype="int64")
    features = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(given))
    outputs = [keras.layers.Dense(2, dtype="float64")(features), keras.layers.Dense(1)(features)]
    model, optimizer = keras.Model(given, outputs), keras.optimizers.SGD(0.1)
    dataset = ({"words": tf.constant(words[each])} for each in slices())
    if scheme is not None:
        model, optimizer, dataset = evenstep.tensorflow.prepare(
            model, optimizer, {"words": words}, scheme, global_batch_size=GLOBAL, seed=5
        )
    epochs = [dataset] if scheme is None else [dataset] * EPOCHS
    for batch in itertools.chain.from_iterable(epochs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch["words"])[0] - 1))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [each.value for each in variables]), variables)
    return {"weights": model.get_weights()}


class Ahead:
    """Rows, each padded to the longest of its batch; it says when a batch is fetched in a thread of evenstep's."""

    def __init__(self, padded):
        self.padded, self.began = padded, threading.Event()

    def __len__(self):
        return LENGTH

    def __getitem__(self, indices):
        if threading.current_thread().name.startswith("evenstep fetch"):
            self.began.set()
        return np.repeat(indices[:, None], indices.max() + 1 if self.padded else 3, 1), indices


def ahead(scheme, padded, waits):
    """Whether each batch is that of its indices; with `waits` the next one is fetched before the step on it."""
    rows, (model, optimizer) = Ahead(padded), made()
    _, _, dataset = evenstep.tensorflow.prepare(model, optimizer, rows, scheme, global_batch_size=GLOBAL, seed=5)
    variables = model.trainable_variables
    for _ in range(EPOCHS):
        for batch in dataset:
            at = dataset.current
            for part, same in zip(batch, rows[at.indices], strict=True):
                np.testing.assert_array_equal(part, same)
            if waits and at.iteration < dataset.cardinality() - 1:
                assert rows.began.wait(GUARD_SECONDS)
                rows.began.clear()
            optimizer.apply([tf.zeros_like(each) for each in variables], variables)


class Short:
    """The data, of which each batch lacks a sample."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, indices):
        return [each[indices][:-1] for each in data()]


def prepared_plainly(model=None, samples=None, scheme="bsp"):
    """A model, its optimizer and its dataset."""
    model, optimizer = made()[0] if model is None else model, keras.optimizers.SGD(0.1)
    samples = data()[:2] if samples is None else samples
    return evenstep.tensorflow.prepare(model, optimizer, samples, scheme, global_batch_size=GLOBAL)


def fit_with_another_optimizer():
    model, _, dataset = prepared_plainly()
    model.compile("sgd", LOSS)
    model.fit(dataset)


def step_another_optimizer():
    """As in a GAN whose second model has an optimizer of its own."""
    _, _, dataset = prepared_plainly()
    second, optimizer = made()
    for inputs, _ in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(second(inputs))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, second.trainable_variables), second.trainable_variables, strict=True)
        )


def follow_own_loss():
    """A learning rate that each worker takes from the loss of its own batch."""
    model, optimizer, dataset = prepared_plainly(made(seed=1)[0], data(), CHANGING)
    step, _ = stepping(model, optimizer)
    for _ in range(2):
        for inputs, labels, _ in dataset:
            optimizer.learning_rate.assign(0.1 * (1 + WORKERS.rank))
            step(inputs, labels)


def fit_several_with_a_mask():
    """Two outputs, of which each has the mask of the words."""
    given = keras.Input([6], dtype="int64")
    vectors = keras.layers.Embedding(20, 4, mask_zero=True)(given)
    model = keras.Model(given, [keras.layers.Dense(3)(vectors), keras.layers.Dense(3)(vectors)])
    words = np.ones([LENGTH, 6], int)
    model, optimizer, dataset = prepared_plainly(model, (words, (words, words)))
    model.compile(optimizer, [LOSS, LOSS])
    model.fit(dataset, verbose=0)


def scale_alone(first=False):
    """Compile in half precision, before `prepare` or after it, so that Keras wraps the optimizer."""
    model, optimizer = made()
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    if first:
        model.compile(optimizer)
    evenstep.tensorflow.prepare(model, optimizer, data()[:2], "bsp", global_batch_size=GLOBAL)
    model.compile(optimizer)


def refused():
    """What is said to each of these mistakes, which all workers make."""
    inputs, labels, _ = data()

    prepare = prepared_plainly

    def scoped():
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = made()[0]
        prepare(model)

    def fitted(validated=False, **options):
        model, _, dataset = prepare()
        model.fit(dataset, **options, **({"validation_data": dataset} if validated else {}))

    def placed(kind="worker", index=0, **cluster):
        read_place({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})})

    def again():
        model, optimizer, _ = prepare()
        evenstep.tensorflow.prepare(model, optimizer, (inputs, labels), global_batch_size=GLOBAL)

    mistakes = {
        "a dataset": lambda: prepare(samples=tf.data.Dataset.from_tensors(inputs)),
        "unequal": lambda: prepare(samples=(inputs, labels[1:])),
        "no index": lambda: prepare(samples=map(abs, [1])),
        "numbers": lambda: prepare(samples=([1, 2], [3, 4])),
        "a scope": scoped,
        "not built": lambda: prepare(keras.Sequential([keras.layers.Dense(1)])),
        "servers": lambda: prepare(scheme="ssp"),
        "again": again,
        "strides": lambda: prepare()[0].compile("sgd", steps_per_execution=3),
        "sum": lambda: prepare()[0].compile("sgd", {"first": keras.losses.MeanSquaredError(reduction="sum")}),
        "no reduction": lambda: prepare()[0].compile("sgd", keras.losses.MeanSquaredError(reduction=None)),
        "classes": lambda: fitted(class_weight={0: 2.0}),
        "a second optimizer": step_another_optimizer,
        "validation": lambda: fitted(validated=True),
        "xla": lambda: prepare()[0].compile("sgd", jit_compile=True),
        "rows": lambda: prepare(samples=Short()),
        "lists": lambda: prepare(samples={"inputs": inputs.tolist()}),
        "private": lambda: sharded("private"),
        "another optimizer": fit_with_another_optimizer,
        "several masks": fit_several_with_a_mask,
        "scaled": scale_alone,
        "scaled before": lambda: scale_alone(first=True),
        "parameter servers": lambda: placed(worker=["a:1"], ps=["b:1"]),
        "another task": lambda: placed("evaluator", worker=["a:1"]),
        "no such worker": lambda: placed(index=2, worker=["a:1", "b:1"]),
    }
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except evenstep.EvenstepError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main(folder):
    """Do the jobs one after the other."""
    jobs = pickle.loads((folder / "jobs").read_bytes())
    found = {}
    for name, (function, arguments) in jobs.items():
        try:
            found[name] = globals()[function](**arguments)
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"
    found["torch"] = "torch" in sys.modules
    (folder / f"result.{WORKERS.rank}").write_bytes(pickle.dumps(found))
    WORKERS.rows.all_gather(b"done")  # The first worker must not end before the others: it leads them.


if __name__ == "__main__":
    main(Path(sys.argv[1]))

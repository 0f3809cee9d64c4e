"""`evenstep.tensorflow.prepare`: the line that balances a script."""

import functools
from typing import Any, Unpack

import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.schemes import Scheme
from evenstep.tensorflow.balanced import PREPARED, Balanced, BalancedDataset
from evenstep.tensorflow.fitting import guard
from evenstep.tensorflow.source import Source
from evenstep.tensorflow.workers import joined
from evenstep.worker.api.balanced_loader import LoaderOptions, balance
from evenstep.worker.replicas import Replicas, sketches_of


def prepare(
    model: Any,
    optimizer: Any,
    data: object,
    scheme: Scheme | str | None = None,
    *,
    global_batch_size: int,
    prefetch: bool = True,
    **options: Unpack[LoaderOptions],
) -> tuple[Any, Any, BalancedDataset]:
    """Let all workers train the model on batches whose sizes follow their speeds.

    The same model and optimizer are returned. The optimizer's `apply`, which `apply_gradients` and `fit` call, sums the
    gradients of all workers, each weighted by its samples, before it steps. The loss must be a mean over the batch, as
    Keras's losses are. All workers start with worker 0's weights. Under `local-sgd` each worker steps on its own
    gradient, and the optimizer averages weights and its state at the end of a period.

    Args:
        model: A built Keras 3 model; compile it before or after this.
        optimizer: A Keras 3 optimizer, the model's own if the model is compiled.
        data: Arrays of equal length, such as `(inputs, labels)`, or an object with `__len__` and a `__getitem__` that
            returns the batch of an array of indices.
        scheme: As for `evenstep.prepare`; None for the one of `evenstep run`, else lb-bsp.
        global_batch_size: Samples in one iteration, over all workers.
        prefetch: Whether the next batch is fetched in a thread while this one is computed. False for data that only one
            thread may read at a time.
        options: `timeout`: seconds that a worker may take from one exchange of all workers to the next, compiling and
            evaluation included, before the others raise an error that names it; by default as `evenstep run` says,
            else 300. `partition="common"`: skip the comparison of a few samples that shows whether data differ.
            `drop_last`, `shuffle`, `seed`, `smallest_batch`, `largest_batch` and `run_dir`: as for
            `evenstep.Balancer`.

    Raises:
        ConfigError: `init` was not called, or an argument cannot work on this worker or on another.
        DisagreementError: The workers were started with different arguments, or have different data.
    """
    workers = joined()
    _require_model(model)
    _require_optimizer(model, optimizer)
    optimizer.build(model.trainable_variables)
    source, variables = Source(data), [*model.variables, *optimizer.variables]
    balancer = balance(
        workers.rows,
        scheme,
        length=source.length,
        global_batch_size=global_batch_size,
        layout=[
            f"an optimizer {type(optimizer).__name__}",
            *(f"a weight or state {n}: {each.dtype} {list(each.shape)}" for n, each in enumerate(variables)),
        ],
        batch_of=lambda at: tf.nest.flatten(source.batch(at)),
        **options,
    )
    scaled = isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer)
    replicas = Replicas(
        workers.rows.gather.records,
        lambda: sketches_of({each.path: each.numpy() for each in model.trainable_variables}),
    )
    balanced = Balanced(workers, balancer, source, scaled=scaled, prefetch=prefetch, replicas=replicas)
    workers.broadcast(variables)
    step = optimizer.apply

    @functools.wraps(step)
    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        variables = model.trainable_variables if trainable_variables is None else list(trainable_variables)
        combined, average = balanced.combine(grads, variables)
        stepped = step(combined, variables)
        balanced.average([*model.variables, *(each for each in optimizer.variables if len(each.shape))], average)
        return stepped

    optimizer.apply = apply
    dataset = BalancedDataset(source.spec, balanced)
    guard(model, optimizer, workers, balanced, dataset)
    for each in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
        setattr(each, PREPARED, True)
    return model, optimizer, dataset


def _require_model(model: Any) -> None:
    if not isinstance(model, tf.keras.Model):
        raise ConfigError(f"the model is {shown(model)}: prepare takes a Keras 3 model")
    strategy = model.distribute_strategy if tf.distribute.has_strategy() else model._distribute_strategy
    if strategy is not None:
        raise ConfigError(
            f"the model is in the scope of a {type(strategy).__name__}, which shares out batches differently: make"
            " the model and call prepare outside of strategy.scope(), for evenstep sums the gradients itself"
        )
    if not model.built:
        raise ConfigError("the model has no weights yet: begin it with a keras.Input, or call it once before prepare")


def _require_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise ConfigError(f"the optimizer is {shown(optimizer)}: prepare takes a Keras 3 optimizer")
    if getattr(getattr(model, "optimizer", None), "inner_optimizer", None) is optimizer:
        raise ConfigError(
            f"compile has wrapped the optimizer in a {type(model.optimizer).__name__}, which looks for overflows before"
            " the gradients are summed: give prepare model.optimizer"
        )
    if getattr(optimizer, PREPARED, False):
        raise ConfigError("the optimizer was prepared already: prepare each optimizer once")

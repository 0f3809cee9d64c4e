"""`evenstep.tensorflow.prepare`: the line that balances a script."""

import functools
import os
from typing import Any, Literal

import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.schemes import Scheme
from evenstep.tensorflow.balanced import Balanced
from evenstep.tensorflow.dataset import BalancedDataset
from evenstep.tensorflow.fitting import guard
from evenstep.tensorflow.source import Source
from evenstep.tensorflow.workers import joined
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.gather import Gather
from evenstep.worker.common_data import require_common

_PREPARED = "_evenstep_prepared"


def prepare(
    model: Any,
    optimizer: Any,
    data: object,
    scheme: Scheme | str | None = None,
    *,
    global_batch_size: int,
    drop_last: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    partition: Literal["common"] | None = None,
    timeout: float | None = None,
    smallest_batch: int = 1,
    largest_batch: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> tuple[Any, Any, BalancedDataset]:
    """Let all workers train the model on batches that follow their speeds.

    The model and the optimizer come back as they are. The optimizer's `apply`, which `apply_gradients` and `fit` call,
    sums the gradients of all workers, each weighted by its samples, before it steps. The loss must be a mean over the
    batch, as Keras's losses are. The weights start as they are on worker 0. Under `local-sgd` each worker steps on its
    own gradient, and the optimizer averages weights and its state where a period ends.

    Args:
        model: A Keras 3 model that is built; compile it before or after this.
        optimizer: A Keras 3 optimizer, of the model if that is compiled.
        data: Arrays of equal length, such as `(inputs, labels)`, or an object with `__len__` and a `__getitem__` that
            returns the batch of an array of indices.
        scheme: As for `evenstep.prepare`; None for that of `evenstep run`, else lb-bsp.
        global_batch_size: Samples in one iteration, over all workers.
        drop_last: As for `evenstep.Balancer`, also the arguments that follow.
        shuffle: Whether the samples come in a new random order in each epoch.
        seed: Of that order.
        partition: "common" leaves out the comparison of a few samples by which workers notice that they have different
            data.
        timeout: Seconds that a worker may take from one exchange of all workers to the next, compiling and evaluation
            included, before the others raise an error that names it; None for that of `evenstep run`, else 300.
        smallest_batch: The smallest batch that a worker can compute on; 2 for models with batch normalisation.
        largest_batch: The largest batch that this worker's memory holds, if it is known.
        run_dir: Folder to which each worker writes its events, for `evenstep report` and `top`.

    Raises:
        ConfigError: `init` was not called, or something given cannot work on this worker or on another.
        DisagreementError: The workers were started with different things, or have different data.
    """
    workers = joined()
    workers.rows.limit(timeout)
    _require_model(model)
    _require_optimizer(model, optimizer)
    source = Source(data)
    arguments: dict[str, Any] = {
        "rank": workers.rank,
        "workers": workers.count,
        "length": source.length,
        "global_batch_size": global_batch_size,
        "drop_last": drop_last,
        "shuffle": shuffle,
        "seed": seed,
        "smallest_batch": smallest_batch,
        "largest_batch": largest_batch,
        "run_dir": run_dir,
    }
    balancer = Balancer(scheme, all_gather=workers.all_gather, averages=True, **arguments)
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    gather = Gather(workers.all_gather, rank=workers.rank, workers=workers.count)
    gather.require_same(
        [
            f"an optimizer {type(optimizer).__name__}",
            *(f"a weight or state {n}: {each.dtype} {list(each.shape)}" for n, each in enumerate(variables)),
        ]
    )
    require_common(
        lambda indices: tf.nest.flatten(source.batch(indices)),
        source.length,
        gather.records,
        rank=workers.rank,
        partition=partition,
    )
    whole, rest = divmod(source.length, global_batch_size)
    scaled = isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer)
    balanced = Balanced(workers, balancer, source, whole + (rest > 0 and not drop_last), scaled=scaled)
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
    setattr(optimizer, _PREPARED, True)
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
    if getattr(optimizer, _PREPARED, False):
        raise ConfigError("the optimizer was prepared already: prepare each optimizer once")

"""`model.fit` and `model.compile` on a prepared dataset: refused options, and the metrics of an epoch."""

import functools
import inspect
import os
import socket
from typing import Any, Final, final

import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.tensorflow.balanced import Balanced, BalancedDataset
from evenstep.tensorflow.workers import Peers

_NO_MEANS: Final = ("sum", "mean_with_sample_weight", "none", None)  # The gradient of a vector is that of its sum.

_FILES: Final = {
    tf.keras.callbacks.ModelCheckpoint: "filepath",
    tf.keras.callbacks.BackupAndRestore: "backup_dir",
    tf.keras.callbacks.CSVLogger: "filename",
}
"""The callbacks that write a file, and the names of its path."""


def guard(model: Any, optimizer: Any, workers: Peers, balanced: Balanced, dataset: BalancedDataset) -> None:
    """Refuse options of `compile` and `fit` that cannot work, and turn off XLA, which Keras chooses by default.

    XLA would compile the step again for each size, and has no kernel for the exchange. A loss with a mask is weighed by
    the number of unmasked elements.
    """
    model.jit_compile = False
    _require_single_steps(getattr(model, "steps_per_execution", 1))
    _require_means(getattr(model, "loss", None))
    compiled, fitted, computed = model.compile, model.fit, model.compute_loss
    compile_arguments, fit_arguments = inspect.signature(compiled), inspect.signature(fitted)
    averaged = _Averaged(workers, balanced)

    @functools.wraps(compiled)
    def compile(*arguments: Any, **options: Any) -> None:
        given = compile_arguments.bind_partial(*arguments, **options).arguments
        if given.get("jit_compile") is True:
            raise ConfigError(
                "jit_compile=True would compile the step again for each size of a batch: leave it out, or make sizes"
                " recur with multiple, as in lb-bsp:multiple=8, and compile parts of the model yourself"
            )
        _require_single_steps(given.get("steps_per_execution", 1))
        _require_means(given.get("loss"))
        if given.get("auto_scale_loss", True):
            _require_common_scale(model, given.get("optimizer"))
        compiled(*arguments, **{**options, "jit_compile": False})

    @functools.wraps(fitted)
    def fit(*arguments: Any, **options: Any) -> Any:
        bound = fit_arguments.bind(*arguments, **options)
        given = bound.arguments
        if isinstance(given.get("validation_data"), BalancedDataset):
            raise ConfigError("the prepared dataset is for training: give validation_data other data")
        if given.get("class_weight"):
            raise ConfigError(
                "with class_weight Keras fetches batches ahead of their steps: give the weight of each sample as"
                " the third of the arrays, (inputs, labels, weights)"
            )
        _require_prepared(model, optimizer)
        # For any x: map() and others make another dataset from the prepared one.
        _write_once(given.get("callbacks"), workers)
        given["callbacks"] = [averaged, given.get("callbacks") or []]
        return fitted(*bound.args, **bound.kwargs)

    @functools.wraps(computed)
    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        if training and (count := _unmasked(model.loss, y, y_pred)) is not None:
            dataset.weigh_by(count)
        return computed(x, y, y_pred, sample_weight, training)

    model.compile, model.fit = compile, fit
    if type(model).compute_loss is tf.keras.Model.compute_loss:  # A script's own may count differently.
        model.compute_loss = compute_loss


def _write_once(callbacks: Any, workers: Peers) -> None:
    """Let one worker of a host write a file that several would write at the same time."""
    host = socket.gethostname()
    writing = [
        (each, f"{host}:{os.path.abspath(getattr(each, name))}")
        for each in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
        for kind, name in _FILES.items()
        if isinstance(each, kind)
    ]
    records = workers.rows.gather.records({"paths": [path for _, path in writing]})
    before = {path for record in records[: workers.rank] for path in record["paths"]}
    for each, path in writing:
        if path not in before:
            continue
        if isinstance(each, tf.keras.callbacks.CSVLogger):
            each.filename = os.devnull
        else:
            each._save_model, each.delete_checkpoint = lambda *_, **__: None, False


def _unmasked(loss: Any, labels: Any, outputs: Any) -> Any:
    """The number of words or pixels in the mean of a loss; None if there is no mask."""
    ignored = [getattr(each, "ignore_class", None) for each in tf.nest.flatten(loss)]
    masks = [getattr(each, "_keras_mask", None) for each in tf.nest.flatten(outputs)]
    if loss is None or all(each is None for each in [*ignored, *masks]):
        return None
    if len(masks) > 1:
        raise ConfigError(
            "with a mask the losses of several outputs are means over different counts, and a worker's gradient has one"
            " weight: write a train_step that divides all of them by one count, and call dataset.weigh_by(count) there"
        )
    counted = tf.ones(tf.shape(labels), tf.bool) if ignored[0] is None else labels != tf.cast(ignored[0], labels.dtype)
    if masks[0] is not None:
        counted = tf.reshape(counted, tf.shape(masks[0])) & masks[0]
    return tf.math.count_nonzero(counted)


def _require_single_steps(steps_per_execution: Any) -> None:
    if steps_per_execution != 1:
        raise ConfigError(
            f"steps_per_execution={steps_per_execution} asks for batches ahead of their steps, and the size of a batch"
            " rests on how long the one before it took: leave it out"
        )


def _require_means(losses: Any) -> None:
    """Refuse losses that are not means over the batch: their gradients cannot be weighted by samples."""
    for loss in tf.nest.flatten(losses):
        if (reduction := getattr(loss, "reduction", "")) in _NO_MEANS:
            raise ConfigError(
                f"the loss has reduction={reduction!r}, and evenstep weights means over batches: leave reduction out"
            )


def _require_prepared(model: Any, optimizer: Any) -> None:
    """Refuse another optimizer, which would step on the gradients of this worker alone."""
    compiled = getattr(model, "optimizer", None)  # Keras itself reports a model that was not compiled.
    if compiled not in (None, optimizer) and type(model).train_step is tf.keras.Model.train_step:
        raise ConfigError(
            "the model was compiled with another optimizer than the prepared one, which sums the gradients of all"
            " workers: give compile the optimizer that prepare returned"
        )


def _require_common_scale(model: Any, optimizer: Any) -> None:
    """Refuse Keras's wrapper of the prepared optimizer, which would skip a step based on one worker's gradients."""
    prepared = isinstance(optimizer, tf.keras.optimizers.Optimizer)
    scales = isinstance(optimizer, tf.keras.optimizers.LossScaleOptimizer)
    if model.dtype_policy.name == "mixed_float16" and prepared and not scales:
        raise ConfigError(
            "under mixed_float16 Keras would look for overflows in the gradients of each worker alone: give prepare and"
            " compile keras.optimizers.LossScaleOptimizer(optimizer), or give compile auto_scale_loss=False"
        )


@final
class _Averaged(tf.keras.callbacks.Callback):
    """Gives the callbacks behind it the same metrics of an epoch on every worker.

    Otherwise ReduceLROnPlateau and EarlyStopping would decide on each worker by its samples alone. Training metrics are
    weighted by the samples of each worker in the epoch, validation metrics equally. If only some workers have a metric,
    such as those that validate, all workers get the average of these.
    """

    def __init__(self, workers: Peers, balanced: Balanced) -> None:
        super().__init__()
        self._gather = workers.rows.gather
        self._balanced = balanced
        self._samples = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._samples = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self._balanced.current is not None
        self._samples += self._balanced.current.samples

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this worker's metrics by the averages, in the dictionary that all callbacks get."""
        logs = {} if logs is None else logs
        own = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        records = self._gather.records({"samples": self._samples, "metrics": own})
        for name in sorted({name for record in records for name in record["metrics"]}):
            having = [record for record in records if name in record["metrics"]]
            weights = [1 if name.startswith("val_") else record["samples"] for record in having]
            weights = weights if any(weights) else [1] * len(having)
            total = sum(record["metrics"][name] * weight for record, weight in zip(having, weights, strict=True))
            logs[name] = total / sum(weights)

"""`model.fit` and `model.compile` on a prepared dataset: what works, what is refused, and the metrics of an epoch."""

import functools
import inspect
from typing import Any, Final, final

import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.tensorflow.balanced import Balanced
from evenstep.tensorflow.dataset import BalancedDataset
from evenstep.tensorflow.workers import Workers
from evenstep.worker.api.gather import Gather

_NO_MEANS: Final = ("sum", "mean_with_sample_weight")


def guard(model: Any, workers: Workers, balanced: Balanced) -> None:
    """Refuse options of `compile` and `fit` that cannot work, and turn XLA off, which Keras chooses unless told not to.

    XLA would compile the step again for each size, and has no kernel for the exchange.
    """
    model.jit_compile = False
    _require_single_steps(getattr(model, "steps_per_execution", 1))
    _require_means(getattr(model, "loss", None))
    compiled, fitted = model.compile, model.fit
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
        compiled(*arguments, **{**options, "jit_compile": False})

    @functools.wraps(fitted)
    def fit(*arguments: Any, **options: Any) -> Any:
        bound = fit_arguments.bind(*arguments, **options)
        given = bound.arguments
        if isinstance(given.get("validation_data"), BalancedDataset):
            raise ConfigError("the prepared dataset is for training: give validation_data other data")
        if isinstance(given.get("x"), BalancedDataset):
            if given.get("class_weight"):
                raise ConfigError(
                    "with class_weight Keras fetches batches ahead of their steps: give the weight of each sample as"
                    " the third of the arrays, (inputs, labels, weights)"
                )
            given["callbacks"] = [averaged, given.get("callbacks") or []]
        return fitted(*bound.args, **bound.kwargs)

    model.compile, model.fit = compile, fit


def _require_single_steps(steps_per_execution: Any) -> None:
    if steps_per_execution != 1:
        raise ConfigError(
            f"steps_per_execution={steps_per_execution} asks for batches ahead of their steps, and the size of a batch"
            " rests on how long the one before it took: leave it out"
        )


def _require_means(losses: Any) -> None:
    """Refuse losses that are no mean over the batch: their gradients cannot be weighted by samples."""
    for loss in tf.nest.flatten(losses):
        if (reduction := getattr(loss, "reduction", None)) in _NO_MEANS:
            raise ConfigError(
                f"the loss has reduction={reduction!r}, and evenstep weights means over batches: leave reduction out"
            )


@final
class _Averaged(tf.keras.callbacks.Callback):
    """Gives the callbacks behind it the same metrics of an epoch on every worker.

    Otherwise ReduceLROnPlateau and EarlyStopping would decide on the samples of each worker alone. Metrics of training
    are weighted by the samples of each worker in the epoch, those of validation alike.
    """

    def __init__(self, workers: Workers, balanced: Balanced) -> None:
        super().__init__()
        self._gather = Gather(workers.all_gather, rank=workers.rank, workers=workers.count)
        self._balanced = balanced
        self._samples = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the samples from here."""
        self._samples = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the samples of the batch."""
        assert self._balanced.current is not None
        self._samples += self._balanced.current.samples

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the averages in the place of this worker's metrics, in the dictionary that all callbacks get."""
        own = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        records = self._gather.records({"samples": self._samples, "metrics": own})
        samples = [record["samples"] for record in records]
        for name in own:
            weights = [1] * len(records) if name.startswith("val_") or not any(samples) else samples
            values = [
                record["metrics"].get(name, 0.0) * weight for record, weight in zip(records, weights, strict=True)
            ]
            logs[name] = sum(values) / sum(weights)

"""`evenstep.mxnet.prepare`: the line that balances a script with a Gluon Trainer."""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, final

import mxnet as mx
import numpy as np
from mxnet import gluon

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.mxnet.workers import Workers, join
from evenstep.schemes import Scheme
from evenstep.worker.api.balanced_loader import BalancedLoader
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.gather import Gather
from evenstep.worker.common_data import require_common

if TYPE_CHECKING:
    from evenstep.worker.api.share import Share

_NO_STEP: Final = "call trainer.step(batch_size) once for each batch of the prepared loader"
_FLOATS: Final = ("float32", "float64")


def prepare(
    trainer: Any,
    loader: Any,
    scheme: Scheme | str | None = None,
    *,
    seed: int = 0,
    partition: Literal["common"] | None = None,
    timeout: float | None = None,
    smallest_batch: int = 1,
    largest_batch: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> tuple[Any, "Loader"]:
    """Let all workers of a distributed kvstore train on batches that follow their speeds.

    The trainer comes back as it is. Its `step` sums the gradients of all workers, each weighted by its samples, so that
    the step is that of one process on the union batch; under `local-sgd` it averages weights and the optimizer's state
    where a period ends. The weights start as they are on worker 0.

    Args:
        trainer: A `gluon.Trainer` with `kvstore="dist_sync"`, before its first step.
        loader: A `gluon.data.DataLoader` of one worker's batch size; the global batch is as many times larger as there
            are workers. `shuffle` and `last_batch` hold for the union of all batches.
        scheme: As for `evenstep.Balancer`, and so are the arguments that follow.
        seed: Of the order of samples.
        partition: "common" leaves out the comparison of a few samples by which workers notice that they have different
            data.
        timeout: Seconds that a worker may take from one exchange of all workers to the next, compiling and evaluation
            included, before the others raise an error that names it; None for that of `evenstep run`, else 300.
        smallest_batch: The smallest batch that a worker can compute on.
        largest_batch: The largest batch that this worker's memory holds, if it is known.
        run_dir: Folder to which each worker writes its events, for `evenstep report` and `top`.

    Raises:
        ConfigError: Something given cannot work on this worker or on another.
        DisagreementError: The workers were started with different things, or have different data.
        WorkerLostError: A worker is gone.
    """
    _require_trainer(trainer)
    shuffle, batch_size, drop_last = _read(loader)
    workers = join(trainer._kvstore_params["kvstore"])
    workers.rows.limit(timeout)
    balancer = Balancer(
        scheme,
        rank=workers.rank,
        workers=workers.count,
        all_gather=workers.all_gather,
        length=len(loader._dataset),
        global_batch_size=batch_size * workers.count,
        drop_last=drop_last,
        shuffle=shuffle,
        seed=seed,
        smallest_batch=smallest_batch,
        largest_batch=largest_batch,
        averages=True,
        run_dir=run_dir,
    )
    gather = Gather(workers.all_gather, rank=workers.rank, workers=workers.count)
    optimizer = trainer._optimizer
    options = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
    gather.require_same(
        [
            f"the optimizer {type(optimizer).__name__} {options}",
            *(f"a weight {n}: {np.dtype(each.dtype)} {list(each.shape)}" for n, each in enumerate(trainer._params)),
        ]
    )
    prepared = Loader(loader, balancer, trainer, workers)
    require_common(
        lambda indices: [each.asnumpy() for each in _arrays(prepared._batch(indices))],
        len(loader._dataset),
        gather.records,
        rank=workers.rank,
        partition=partition,
    )
    # The trainer's own exchange is not used: the keys of a second trainer would be those of the first.
    trainer._kv_initialized, trainer._kvstore, trainer._update_on_kvstore = True, None, False
    workers.broadcast([each.data() for each in trainer._params])
    trainer.step = prepared._stepping(trainer.step)
    trainer.allreduce_grads = trainer.update = _refuse_parts
    _refuse_clipping(trainer)
    return trainer, prepared


@final
class Loader(BalancedLoader):
    """This worker's batches. Each loop over it is the next epoch; `prepare` makes it.

    Attributes:
        current: The share of the batch that was handed out last; None before the first.
    """

    def __init__(self, loader: Any, balancer: Balancer, trainer: Any, workers: Workers) -> None:
        self.current: Share | None = None
        self._loader = loader
        self._balancer = balancer
        self._trainer = trainer
        self._workers = workers
        self._handed: float | None = None

    def __iter__(self) -> Iterator[Any]:
        for share in self._balancer.epoch():
            batch = self._batch(share.indices)
            self.current, self._handed = share, time.perf_counter()
            yield batch
            if self._handed is not None:
                raise ConfigError(f"a batch was asked for before the step on the last one: {_NO_STEP}")

    def _settled(self) -> Balancer:
        return self._balancer

    def __len__(self) -> int:
        """The iterations of an epoch."""
        sampler, workers = self._loader._batch_sampler, self._workers.count
        whole, rest = divmod(len(self._loader._dataset), sampler._batch_size * workers)
        return whole + (rest > 0 and sampler._last_batch == "keep")

    def _batch(self, indices: IntArray) -> Any:
        """The samples with these indices."""
        return self._loader._batchify_fn([self._loader._dataset[int(at)] for at in indices])

    def _stepping(self, step: Callable[..., None]) -> Callable[..., None]:
        """The trainer's `step`, on the gradients of all workers."""

        def balanced(batch_size: int, ignore_stale_grad: bool = False) -> None:
            share = self.current
            if share is None or self._handed is None:
                raise ConfigError(f"the trainer steps without a batch of the prepared loader in hand: {_NO_STEP}")
            if batch_size not in (1, len(share.indices)):
                raise ConfigError(
                    f"this batch has {len(share.indices)} samples and the trainer was told to step on {batch_size}:"
                    " give step the samples of the batch, as in step(len(labels)), or 1 if the loss is a mean"
                )
            gradients = [each.list_grad()[0] for each in self._trainer._params if each.grad_req != "null"]
            finite = all(bool(mx.nd.all_finite(each).asscalar()) for each in gradients)  # It waits for them.
            self._balancer.report(time.perf_counter() - self._handed, finite=finite)
            self._handed, self.current = None, self._balancer.share
            share = self._balancer.share
            assert share is not None
            # Divided here: a batch of one sample does not say whether the loss is a mean, and all must divide alike.
            self._combine(gradients, share.weight / batch_size, summed=self._balancer.scheme.period is None)
            step(1, ignore_stale_grad)
            if share.average is not None:
                weights = [each.data() for each in self._trainer._params]
                states = [each for updater in self._trainer._updaters for each in _arrays(updater.states)]
                self._combine([*weights, *states], share.average, summed=True)

        return balanced

    def _combine(self, arrays: Sequence[Any], weight: float, *, summed: bool) -> None:
        """Multiply the arrays by the weight, in place, and add up those of all workers if they are to be summed."""
        for kind in dict.fromkeys(np.dtype(each.dtype).name for each in arrays):
            alike = [each for each in arrays if np.dtype(each.dtype).name == kind]
            flat = mx.nd.concat(*(each.reshape(-1) for each in alike), dim=0)
            # An array, since a number would be rounded to float32; and 0 times NaN would be NaN.
            flat = flat * mx.nd.array([weight], dtype=kind) if weight else mx.nd.zeros_like(flat)
            flat, at = self._workers.sum(flat) if summed else flat, 0
            for each in alike:
                each[:] = flat[at : at + each.size].reshape(each.shape)
                at += each.size


def _refuse_parts(*_: Any, **__: Any) -> None:
    raise ConfigError(
        f"the gradients of all workers are summed in step alone, and not by allreduce_grads and update: {_NO_STEP}"
    )


def _refuse_clipping(trainer: Any) -> None:
    """Refuse `clip_global_norm` on gradients of the trainer, wherever a module has that function."""
    clip = gluon.utils.clip_global_norm

    @functools.wraps(clip)
    def clipping(arrays: Any, *arguments: Any, **options: Any) -> Any:
        gradients = {id(each) for one in trainer._params if one.grad_req != "null" for each in one.list_grad()}
        if not gradients.isdisjoint(map(id, arrays)):
            raise ConfigError(
                "clip_global_norm would clip this worker's gradient before those of all workers are summed in step:"
                " give the optimizer clip_gradient, which clips each number of the sum"
            )
        return clip(arrays, *arguments, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("clip_global_norm") is clip:
            module.__dict__["clip_global_norm"] = clipping


def _arrays(states: Any) -> list[Any]:
    """The arrays in an optimizer's state or in a batch, in the same order on every worker."""
    if isinstance(states, dict):
        return [array for key in sorted(states) for array in _arrays(states[key])]
    if isinstance(states, list | tuple):
        return [array for each in states for array in _arrays(each)]
    return [states] if isinstance(states, mx.nd.NDArray) else []


def _require_trainer(trainer: Any) -> None:
    if not isinstance(trainer, gluon.Trainer):
        raise ConfigError(f"the trainer is {shown(trainer)}: prepare takes a gluon.Trainer")
    if trainer._kv_initialized:
        raise ConfigError("the trainer has stepped or was prepared already: prepare it once, before its first step")
    if trainer._kvstore_params["update_on_kvstore"]:
        raise ConfigError(
            "with update_on_kvstore=True the store divides every gradient by the first batch's size: leave it out"
        )
    if trainer._compression_params:
        raise ConfigError("compressed gradients cannot be weighted exactly: leave out compression_params")
    for each in trainer._params:
        if each._data is None or len(each.list_ctx()) != 1:
            raise ConfigError(
                f"the parameter {each.name} has no values yet, or several contexts: initialize the net on one context"
                " for each worker, and call it once before prepare if it has no in_units"
            )
        if np.dtype(each.dtype).name not in _FLOATS or each._stype != "default" or each._grad_stype != "default":
            raise ConfigError(f"the parameter {each.name} is no dense array of float32 or float64")


def _read(loader: Any) -> tuple[bool, int, bool]:
    """Whether it shuffles, one worker's batch size, and whether the last batch is dropped."""
    if not isinstance(loader, gluon.data.DataLoader):
        raise ConfigError(f"the loader is {shown(loader)}: prepare takes a gluon.data.DataLoader")
    sampler = loader._batch_sampler
    order = getattr(sampler, "_sampler", None)
    if not isinstance(sampler, gluon.data.BatchSampler) or not isinstance(
        order, gluon.data.RandomSampler | gluon.data.SequentialSampler
    ):
        raise ConfigError("the loader has a custom sampler: give shuffle= and batch_size= instead")
    if sampler._last_batch == "rollover" or loader._num_workers:
        raise ConfigError('the loader has last_batch="rollover" or num_workers: leave them out')
    return isinstance(order, gluon.data.RandomSampler), sampler._batch_size, sampler._last_batch == "discard"

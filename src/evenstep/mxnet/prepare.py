"""`evenstep.mxnet.prepare`: the line that balances a script with a Gluon Trainer."""

import atexit
import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Unpack, final

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data.dataloader import _thread_worker_fn, _worker_fn  # They have no public names.

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.mxnet.workers import StoreWorkers, join
from evenstep.schemes import Scheme
from evenstep.worker.api.ahead import Ahead
from evenstep.worker.api.balanced_loader import BalancedLoader, LoaderOptions, balance
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share
from evenstep.worker.api.share_batches import ShareBatches, refused
from evenstep.worker.replicas import Replicas, sketches_of

_NO_STEP: Final = "call trainer.step(batch_size) once for each batch of the prepared loader"
_FLOATS: Final = ("float32", "float64")
_OTHER: Final = (
    "a trainer that was not prepared steps in the loop over the prepared loader, on gradients of this worker alone:"
    " give one trainer the parameters of all nets, and step once for each batch"
)
# A prepared trainer has a step of its own. The store of another would never answer.
_LOOP: Final = partial(refused, gluon.Trainer, "step", lambda trainer: None if "step" in vars(trainer) else _OTHER)


def prepare(
    trainer: Any,
    loader: Any,
    scheme: Scheme | str | None = None,
    **options: Unpack[LoaderOptions],
) -> tuple[Any, "Loader"]:
    """Let all workers of a distributed kvstore train on batches whose sizes follow their speeds.

    The same trainer is returned. Its `step` sums the gradients of all workers, each weighted by its samples, so that
    the step equals that of one process on the union batch; under `local-sgd` it averages weights and the optimizer's
    state at the end of a period. All workers start with worker 0's weights.

    Args:
        trainer: A `gluon.Trainer` with `kvstore="dist_sync"`, before its first step.
        loader: A `gluon.data.DataLoader` with the batch size of one worker; the global batch is this times the number
            of workers. `shuffle` and `last_batch` apply to the union of all batches. With `num_workers` the next batch
            is fetched while this one is computed.
        scheme: As for `evenstep.Balancer`.
        options: `timeout`: seconds that a worker may take from one exchange of all workers to the next, compiling and
            evaluation included, before the others raise an error that names it; by default as `evenstep run` says,
            else 300. `partition="common"`: skip the comparison of a few samples that shows whether data differ.
            `seed`, `smallest_batch`, `largest_batch` and `run_dir`: as for `evenstep.Balancer`.

    Raises:
        ConfigError: An argument cannot work on this worker or on another.
        DisagreementError: The workers were started with different arguments, or have different data.
        WorkerLostError: A worker is gone.
    """
    _require_trainer(trainer)
    shuffle, batch_size, drop_last = _read(loader)
    workers = join(trainer._kvstore_params["kvstore"])
    optimizer = trainer._optimizer
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
    balancer = balance(  # type: ignore[misc]  # Options that the loader decides are refused here.
        workers.rows,
        scheme,
        length=len(loader._dataset),
        global_batch_size=batch_size * workers.count,
        drop_last=drop_last,
        shuffle=shuffle,
        layout=[
            f"the optimizer {type(optimizer).__name__} {numbers}",
            *(f"a weight {n}: {np.dtype(each.dtype)} {list(each.shape)}" for n, each in enumerate(trainer._params)),
        ],
        batch_of=lambda indices: [each.asnumpy() for each in _arrays(_batch(loader, indices))],
        **options,
    )
    prepared = Loader(loader, balancer, trainer, workers)
    # The trainer's own exchange is not used: a second trainer would use the keys of the first.
    trainer._kv_initialized, trainer._kvstore, trainer._update_on_kvstore = True, None, False
    workers.broadcast([each.data() for each in trainer._params])
    trainer.step = prepared._stepping(trainer.step)
    trainer.allreduce_grads = trainer.update = _refuse_parts
    _refuse_clipping(trainer)
    return trainer, prepared


@final
class Loader(BalancedLoader):
    """This worker's batches. Each loop over it is the next epoch; `prepare` makes it."""

    def __init__(self, loader: Any, balancer: Balancer, trainer: Any, workers: StoreWorkers) -> None:
        self._balancer = balancer
        self._trainer = trainer
        self._workers = workers
        replicas = Replicas(
            workers.rows.gather.records,
            lambda: sketches_of({each.name: each.data().asnumpy() for each in _trained(trainer)}),
        )
        ahead = Ahead(partial(_batch, loader), partial(_begin, loader) if loader._num_workers else None)
        self._batches = ShareBatches(balancer, ahead, f"the step on the last one: {_NO_STEP}", _LOOP, replicas=replicas)
        if loader._num_workers:  # A pool thread that is alive at exit could abort the process.
            atexit.register(loader._worker_pool.join)
            atexit.register(loader._worker_pool.terminate)  # Exit functions registered last run first.

    def __iter__(self) -> Iterator[Any]:
        return self._batches.of(self._balancer.epoch())

    @property
    def current(self) -> Share | None:
        """The share of the batch that was handed out last; None before the first."""
        return self._batches.current

    def _settled(self) -> Balancer:
        return self._balancer

    def __len__(self) -> int:
        """The iterations of an epoch."""
        return self._balancer.iterations

    def _stepping(self, step: Callable[..., None]) -> Callable[..., None]:
        """The trainer's `step`, on the gradients of all workers."""

        def balanced(batch_size: int, ignore_stale_grad: bool = False) -> None:
            share = self.current
            if share is None or not self._batches.due:
                raise ConfigError(f"the trainer steps without a current batch of the prepared loader: {_NO_STEP}")
            if batch_size not in (1, len(share.indices)):
                raise ConfigError(
                    f"this batch has {len(share.indices)} samples and the trainer was told to step on {batch_size}:"
                    " give step the samples of the batch, as in step(len(labels)), or 1 if the loss is a mean"
                )
            gradients = [each.list_grad()[0] for each in _trained(self._trainer)]
            finite = all(bool(mx.nd.all_finite(each).asscalar()) for each in gradients)  # This waits for the gradients.
            share = self._batches.report(finite=finite)
            # Divided here: all must divide alike, and a batch of one sample does not show whether the loss is a mean.
            self._combine(gradients, share.weight / batch_size, summed=self._balancer.scheme.period is None)
            step(1, ignore_stale_grad)
            if share.average is not None:
                weights = [each.data() for each in self._trainer._params]
                states = [each for updater in self._trainer._updaters for each in _arrays(updater.states)]
                self._combine([*weights, *states], share.average, summed=True)

        return balanced

    def _combine(self, arrays: Sequence[Any], weight: float, *, summed: bool) -> None:
        """Multiply the arrays by the weight, in place, and if `summed`, add up those of all workers."""
        for kind in dict.fromkeys(np.dtype(each.dtype).name for each in arrays):
            alike = [each for each in arrays if np.dtype(each.dtype).name == kind]
            flat = mx.nd.concat(*(each.reshape(-1) for each in alike), dim=0)
            # As an array, because a number would be rounded to float32; zeros, because 0 times NaN would be NaN.
            flat = flat * mx.nd.array([weight], dtype=kind) if weight else mx.nd.zeros_like(flat)
            flat, at = self._workers.sum(flat) if summed else flat, 0
            for each in alike:
                each[:] = flat[at : at + each.size].reshape(each.shape)
                at += each.size


def _batch(loader: Any, indices: IntArray) -> Any:
    """The samples of the loader with these indices."""
    if loader._worker_pool is not None:
        return _begin(loader, indices)()
    return loader._batchify_fn([loader._dataset[int(at)] for at in indices])


def _begin(loader: Any, indices: IntArray) -> Callable[[], Any]:
    """Start to fetch these samples with the loader's own workers, like its own iterator."""
    threads = loader._thread_pool
    work, dataset = (_thread_worker_fn, loader._dataset) if threads else (_worker_fn, None)
    coming = loader._worker_pool.apply_async(work, (indices.tolist(), loader._batchify_fn, dataset))
    return lambda: coming.get(loader._timeout) if threads else pickle.loads(coming.get(loader._timeout))


def _refuse_parts(*_: Any, **__: Any) -> None:
    raise ConfigError(
        f"the gradients of all workers are summed in step alone, and not by allreduce_grads and update: {_NO_STEP}"
    )


def _refuse_clipping(trainer: Any) -> None:
    """Refuse `clip_global_norm` on the trainer's gradients, in every module that has this function."""
    clip = gluon.utils.clip_global_norm

    @functools.wraps(clip)
    def clipping(arrays: Any, *arguments: Any, **options: Any) -> Any:
        gradients = {id(each) for one in _trained(trainer) for each in one.list_grad()}
        if not gradients.isdisjoint(map(id, arrays)):
            raise ConfigError(
                "clip_global_norm would clip this worker's gradient before those of all workers are summed in step:"
                " give the optimizer clip_gradient, which clips each number of the sum"
            )
        return clip(arrays, *arguments, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("clip_global_norm") is clip:
            module.__dict__["clip_global_norm"] = clipping


def _trained(trainer: Any) -> list[Any]:
    """The trainer's parameters without BatchNorm's statistics and frozen ones."""
    return [each for each in trainer._params if each.grad_req != "null"]


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
            raise ConfigError(f"the parameter {each.name} is not a dense array of float32 or float64")


def _read(loader: Any) -> tuple[bool, int, bool]:
    """Return whether it shuffles, one worker's batch size, and whether the last batch is dropped."""
    if not isinstance(loader, gluon.data.DataLoader):
        raise ConfigError(f"the loader is {shown(loader)}: prepare takes a gluon.data.DataLoader")
    sampler = loader._batch_sampler
    order = getattr(sampler, "_sampler", None)
    if not isinstance(sampler, gluon.data.BatchSampler) or not isinstance(
        order, gluon.data.RandomSampler | gluon.data.SequentialSampler
    ):
        raise ConfigError("the loader has a custom sampler: give shuffle= and batch_size= instead")
    if sampler._last_batch == "rollover":
        raise ConfigError('the loader has last_batch="rollover": leave it out')
    return isinstance(order, gluon.data.RandomSampler), sampler._batch_size, sampler._last_batch == "discard"

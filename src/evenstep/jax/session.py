"""`evenstep.jax.Session`: uneven shares and the gradient of their union, for a training loop in JAX."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar, Unpack, final

import jax
import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.experts import Experts
from evenstep.core.values import IntArray, require_whole
from evenstep.jax.processes import Processes, checksum_of, dtype_of, layout_of
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.worker.api.ahead import Ahead, in_thread
from evenstep.worker.api.balanced_loader import BalancedLoader, LoaderOptions, balance
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share
from evenstep.worker.api.share_batches import ShareBatches
from evenstep.worker.common_data import length_of, require_rows

Tree = TypeVar("Tree")

_NO_MEAN: Final = "the mean over the last one: let the loop have gradients = session.mean(gradients) for each batch"
_LAUNCHED: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@final
class Session(BalancedLoader):
    """This worker's part of every batch, sized so that all workers take the same time, and means over the workers.

        jax.distributed.initialize(...)
        session = evenstep.jax.Session(
            "lb-bsp:multiple=8", weights=(weights, state), data=(images, labels), global_batch_size=256
        )
        for epoch in range(epochs):
            for images, labels in session.epoch(epoch):
                loss, gradients = jitted_value_and_grad(weights, images, labels)
                loss, gradients = session.mean((loss, gradients))
                ...                                 # the optimizer's step, the same on every worker

    Each process of `jax.distributed` is a worker, and all make the same calls. The loss must be a mean over the batch.
    `mean` then returns the loss and the gradient of the union of all batches, as one process would compute them. The
    user keeps the weights and the optimizer's state, which must start with the same values on every worker.

    Under `local-sgd` each worker steps on the gradient of its own batch. The loop then needs one more line after the
    step, which has no effect under other schemes:

                weights, state = session.average((weights, state))

    jit compiles a function for each batch size. This cost is measured, and sizes change only when the gain has paid
    for it. Recurring sizes cost less: give `pad`, or the scheme's `multiple`.

    Args:
        scheme: A scheme without parameter servers: `"lb-bsp:multiple=8"`, `"dbs"`, or the result of a recipe. None: the
            environment's, else `lb-bsp`.
        weights: All initial weights, and all else that must start equal, in any tree; workers compare checksums.
        data: Arrays with one row per sample, in a tuple, a dict or any other tree; or any object with a length that
            returns a batch for an int64 array of indices. `numpy.arange(length)` gives the indices themselves.
        global_batch_size: Samples in one iteration, over all workers.
        pad: Repeat the last sample of each batch until its rows are a multiple of this. The loop then gives pairs of
            a batch and a mask, bool of shape [rows], for `jnp.mean(losses, where=mask)`. Sizes that follow speeds are
            multiples of it where the global batch is one, so that only the last batch of an epoch has copies. That one
            has as many rows as the batch before it, for which jit has compiled.
        prefetch: Whether the next batch is fetched in a thread while this one is computed. False for data that only the
            main thread may read.
        options: `timeout`: seconds that a worker may take from one exchange of all workers to the next, compiling and
            evaluation included, before the others raise an error that names it; by default as `evenstep run` says,
            else 300. `partition="common"`: skip the comparison of a few samples that shows whether data differ.
            `drop_last`, `shuffle`, `seed`, `smallest_batch`, `largest_batch` and `run_dir`: as for
            `evenstep.Balancer`.

    Raises:
        ConfigError: A request cannot work, on this worker or on another one; the message names the worker.
        DisagreementError: The workers were started with different schemes, lengths, sizes, seeds or weights, or have
            different data.
        WorkerLostError: A worker is gone.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        weights: Any,
        data: Any,
        global_batch_size: int,
        pad: int | None = None,
        prefetch: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        started = next((name for name in _LAUNCHED if os.environ.get(name, "1") not in ("", "1")), None)
        if started is not None and not jax.distributed.is_initialized():
            raise ConfigError(
                f"{started} says that there are {os.environ[started]} processes, but this one does not know the others:"
                " call jax.distributed.initialize() first"
            )
        self._data, self._pad = data, None if pad is None else require_whole("pad", pad, 1, 2**31 - 1)
        self._processes = Processes()
        self._balancer = balance(
            self._processes.rows,
            _in_steps(scheme, self._pad, global_batch_size),
            length=length_of(jax.tree.leaves(data, is_leaf=lambda each: isinstance(each, Iterator))),
            global_batch_size=global_batch_size,
            layout=layout_of(weights, checksum_of),
            batch_of=lambda indices: jax.tree.leaves(self._batch(indices)),
            **options,
        )
        ahead = Ahead(
            self._batch,
            in_thread(self._batch) if prefetch else None,
            leaves=jax.tree.leaves,
            build=lambda like, leaves: jax.tree.unflatten(jax.tree.structure(like), leaves),
        )
        self._batches = ShareBatches(self._balancer, ahead, _NO_MEAN, indices_of=self._indices)
        self._compiling: _Compiling | None = _Compiling()
        self._global_batch_size, self._rows = global_batch_size, 0
        self._mask: Any = None
        self._looping = self._unaveraged = False

    @property
    def share(self) -> Share | None:
        """This worker's part of the current iteration: its indices, samples and weight; None outside the loop."""
        return self._batches.current if self._looping else None

    def epoch(self, epoch: int | None = None) -> Iterator[Any]:
        """This worker's batches of the epoch, by default the next one; after `load_state_dict`, its remaining ones.

        A batch has the form of `data`; with `pad` the loop gives pairs of a batch and a mask. Every worker has the same
        number of batches. A batch whose `session.share.samples` is 0 is a copy of another worker's sample.
        """
        self._require_averaged()
        try:
            for batch in self._batches.of(self._balancer.epoch(epoch)):
                self._looping = True
                yield batch if self._mask is None else (batch, self._mask)
                if not self._batches.due:
                    self._require_averaged()
        finally:
            self._looping = False

    def mean(self, tree: Tree) -> Tree:
        """The mean over all workers of each array of the tree, by their samples; the same on all of them.

        The first call for a batch ends its compute, which is measured from the batch until the tree is ready. Under
        `local-sgd` it returns this worker's own means, or zeros if its share is a copy. If an array is not finite, the
        scheme's `nonfinite` decides; in float16 an infinity tells every worker to lower its scale.

        Args:
            tree: Means over this worker's batch: losses, gradients, metrics.

        Raises:
            ConfigError: There is no batch, an array does not hold floating-point numbers, or the call is inside of jit.
            DisagreementError: The workers are in different iterations; nothing has been summed yet.
            WorkerLostError: A worker is gone.
        """
        if (share := self.share) is None:
            raise ConfigError("there is no batch to take a mean over: call mean inside the loop over session.epoch()")
        for each in jax.tree.leaves(tree):
            if isinstance(each, jax.core.Tracer):
                raise ConfigError(
                    "mean exchanges arrays with other processes, which jit cannot trace: call it outside of jit"
                )
            if not _is_floating(each):
                raise ConfigError(
                    f"a mean over workers is of floating-point numbers, not of {dtype_of(each)}: leave other arrays out"
                )
        tree = jax.block_until_ready(tree)
        if self._batches.due:
            finite, compiled = _is_finite(jax.tree.leaves(tree)), 0.0
            if self._compiling is not None:  # In the first iteration, compiling does not count in the speed.
                compiled, self._compiling = self._compiling.seconds, None
            share = self._batches.report(finite=finite, apart=compiled)
            self._unaveraged = share.average is not None
        if self._balancer.scheme.period is not None:
            return tree if share.weight else jax.tree.map(jax.numpy.zeros_like, tree)
        return self._processes.mean(tree, share.weight)

    def average(self, tree: Tree) -> Tree:
        """Under `local-sgd`, at the end of a period: the workers' arrays averaged by their samples since the last one.

        Everywhere else, and under other schemes, the tree is returned unchanged.

        Args:
            tree: All weights, and the optimizer's state, after the step. Integers, such as counts of steps, are
                the same on all workers and are returned unchanged.

        Raises:
            ConfigError: There is no batch, or its gradient was not given to `mean`.
            WorkerLostError: A worker is gone.
        """
        if (share := self.share) is None or self._batches.due:
            raise ConfigError("call average inside the loop over session.epoch(), after mean and the optimizer's step")
        if share.average is None:
            return tree
        self._unaveraged = False
        leaves, form = jax.tree.flatten(tree)
        means = iter(self._processes.mean(list(filter(_is_floating, leaves)), share.average))
        return jax.tree.unflatten(form, [next(means) if _is_floating(each) else each for each in leaves])

    def weigh_by(self, count: Any) -> None:
        """Weigh this batch by `count`, before `mean`. With `pad`, count only what the mask keeps."""
        share = self.share
        if share is not None and share.samples and self._pad is not None:
            with suppress(TypeError):  # The Balancer refuses what is not a number.
                count = count * len(share.positions) / share.samples  # The mask keeps no sample twice.
        self._balancer.weigh_by(count)

    def _indices(self, share: Share, planned: bool) -> IntArray:
        """The indices of a share's batch, padded. Unless it is only planned, its rows and its mask are kept."""
        if self._pad is None:
            return share.indices
        real = share.samples or len(share.indices)  # All rows of a copy count as real: its weight is 0.
        rows = -(-real // self._pad) * self._pad
        if int(share.sizes.sum()) < self._global_batch_size:
            rows = max(rows, self._rows)
        if not planned:
            self._rows, self._mask = rows, np.arange(rows) < real
        return share.indices[np.minimum(np.arange(rows), real - 1)]

    def _batch(self, indices: IntArray) -> Any:
        """The samples with these indices, in the form of `data`."""
        batch = jax.tree.map(lambda each: each[indices], self._data)
        require_rows(jax.tree.leaves(batch), indices)
        return batch

    def _settled(self) -> Balancer:
        return self._balancer

    def _require_averaged(self) -> None:
        if self._unaveraged:
            raise ConfigError(
                f"the scheme {self._balancer.scheme.name!r} averages weights, and these were not averaged: let the loop"
                " have weights, state = session.average((weights, state)) after the optimizer's step"
            )


def _is_finite(leaves: list[Any]) -> bool:
    """True if no array holds a NaN or an infinity."""
    together: dict[Any, list[Any]] = {}  # jit takes arrays of the same devices.
    for each in leaves:
        if dtype_of(each) == jax.numpy.float16:
            return True
        devices = frozenset(each.sharding.device_set if isinstance(each, jax.Array) else ())
        together.setdefault(devices, []).append(each)
    return all(bool(_all_finite(each)) for each in together.values())


_all_finite: Final = jax.jit(lambda leaves: jax.numpy.array([jax.numpy.isfinite(each).all() for each in leaves]).all())


def _is_floating(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype_of(leaf), jax.numpy.inexact))


def _in_steps(scheme: Scheme | str | None, pad: int | None, global_batch_size: object) -> Scheme | str | None:
    """The scheme, with sizes in multiples of `pad` if they follow speeds and no other multiple is given.

    There is no warm-up: jit often compiles again for the second iteration, when weights come from the optimizer, so
    sizes that already follow from the first one (without its compilation) cost nothing extra.
    """
    made = LaunchSettings.from_environment(os.environ).scheme_of(scheme)
    load = made.load
    if isinstance(load, Experts):
        load = replace(load, warmup=0, compiles=True)
    if pad is not None and load.follows_speed and load.multiple == 1:
        # The Balancer reports a global batch that is not a number.
        fits = isinstance(global_batch_size, int) and global_batch_size % pad == 0
        load = replace(load, multiple=pad if fits else 1)
    return replace(made, load=load)


@final
class _Compiling:
    """The seconds that JAX spends on tracing, lowering and compiling; overlapping times count once."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self.ended)

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self._spans)

    def ended(self, event: str, duration: float, **_: object) -> None:
        """Take an event from JAX, which took `duration` seconds and has just ended."""
        if event.startswith("/jax/core/compile/"):
            end = time.perf_counter()
            start = end - duration
            while self._spans and self._spans[-1][0] >= start:  # Of nested events, the outer one ends last.
                self._spans.pop()
            self._spans.append((start, end))

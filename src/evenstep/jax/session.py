"""`evenstep.jax.Session`: uneven shares and the gradient of their union, for a training loop in JAX."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar, final

import jax
import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.experts import Experts
from evenstep.core.shown import shown
from evenstep.core.values import IntArray, require_whole
from evenstep.jax.compiling import Compiling
from evenstep.jax.processes import Processes
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import DEFAULT, Scheme, parse_scheme
from evenstep.worker.api.balanced_loader import BalancedLoader
from evenstep.worker.api.balancer import Balancer
from evenstep.worker.api.share import Share
from evenstep.worker.common_data import require_common

Tree = TypeVar("Tree")

_LAUNCHED: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@final
class Session(BalancedLoader):
    """This worker's part of every batch, sized so that all workers take equally long, and means over the workers.

        jax.distributed.initialize(...)
        session = evenstep.jax.Session("lb-bsp:multiple=8", data=(images, labels), global_batch_size=256)
        for epoch in range(epochs):
            for images, labels in session.epoch(epoch):
                loss, gradients = jitted_value_and_grad(weights, images, labels)
                loss, gradients = session.mean((loss, gradients))
                ...                                 # the optimizer's step, the same on every worker

    Each process of `jax.distributed` is a worker, and all make the same calls. The loss is a mean over the batch.
    `mean` gives the loss and the gradient of the union of all batches, as one process would compute them. Weights and
    the optimizer's state are the user's: give them the same first values on every worker.

    Under `local-sgd` each worker steps on the gradient of its batch. The loop then needs one more line after the step,
    which changes nothing under other schemes:

                weights, state = session.average((weights, state))

    jit compiles a function for each size of its batch. What that costs is measured, and sizes change when they have
    paid for it. Sizes that recur cost less: give `pad`, or the scheme's `multiple`.

    Args:
        scheme: A scheme without parameter servers: `"lb-bsp:multiple=8"`, `"dbs"`, or what a recipe returns. None: that
            of the environment, else `lb-bsp`.
        data: Arrays with one row per sample, in a tuple, a dict or any other tree; or any object with a length that
            returns a batch for an int64 array of indices. `numpy.arange(length)` gives the indices themselves.
        global_batch_size: Samples in one iteration, over all workers.
        pad: Repeat the last sample of each batch until its rows are a multiple of this. The loop then gives pairs of
            a batch and a mask, bool of shape [rows], for `jnp.mean(losses, where=mask)`. Sizes that follow speeds are
            multiples of it where the global batch is one, so that only the last batch of an epoch has copies. That one
            has as many rows as the batch before it, for which jit has compiled.
        drop_last: Leave out a last iteration of fewer samples.
        shuffle: Whether the samples come in a new random order in each epoch.
        seed: Of that order.
        partition: "common" leaves out the comparison of a few samples by which workers notice that they have different
            data.
        timeout: Seconds that a worker may take from one exchange of all workers to the next, compiling and evaluation
            included, before the others raise an error that names it; None for that of `evenstep run`, else 300.
        smallest_batch: The smallest share that a worker can compute on; 2 for models with batch normalisation.
        largest_batch: The largest share that this worker's memory holds, if it is known.
        run_dir: Folder to which each worker writes its events, for `evenstep report` and `top`.

    Raises:
        ConfigError: Something asked for cannot work on this worker or on another, which is named.
        DisagreementError: The workers were started with different schemes, lengths, sizes or seeds, or have different
            data.
        WorkerLostError: A worker is gone.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        data: Any,
        global_batch_size: int,
        pad: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        partition: Literal["common"] | None = None,
        timeout: float | None = None,
        smallest_batch: int = 1,
        largest_batch: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _require_initialised()
        self._data, self._pad = data, None if pad is None else require_whole("pad", pad, 1, 2**31 - 1)
        self._processes = Processes(timeout)
        self._balancer = Balancer(
            _in_steps(scheme, self._pad, global_batch_size),
            rank=self._processes.rank,
            workers=self._processes.count,
            all_gather=self._processes.all_gather,
            length=_length_of(data),
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            smallest_batch=smallest_batch,
            largest_batch=largest_batch,
            averages=True,
            run_dir=run_dir,
        )
        require_common(
            lambda indices: jax.tree.leaves(self._batch(indices)),
            _length_of(data),
            self._processes.gather.records,
            rank=self._processes.rank,
            partition=partition,
        )
        self._compiling: Compiling | None = Compiling()
        self._global_batch_size, self._rows = global_batch_size, 0
        self._share: Share | None = None
        self._since: float | None = None
        self._unaveraged = False

    @property
    def share(self) -> Share | None:
        """This worker's part of the present iteration: its indices, samples and weight; None outside the loop."""
        return self._share

    def epoch(self, epoch: int | None = None) -> Iterator[Any]:
        """This worker's batches of the epoch, or of the next one; after `load_state_dict`, those that are left of it.

        A batch is of the form of `data`; with `pad` it is the first of a pair, and a mask the second. Every worker has
        as many batches as the others. One whose `session.share.samples` is 0 is a copy of another worker's sample.
        """
        try:
            self._require_averaged()
            for share in self._balancer.epoch(epoch):
                indices, mask = (share.indices, None) if self._pad is None else self._padded(share, self._pad)
                batch = self._batch(indices)
                self._share = share
                self._since = time.perf_counter()
                yield batch if mask is None else (batch, mask)
                self._require_mean()
                self._require_averaged()
        finally:
            self._share = None

    def mean(self, tree: Tree) -> Tree:
        """The mean over all workers of each array of the tree, by their samples; the same on all of them.

        The first call for a batch ends the compute on it, which is measured from the batch until the tree is ready.
        Under `local-sgd` it returns this worker's own means, or zeros if its share is a copy. If an array is not
        finite, the scheme's `nonfinite` decides; in float16 an infinity tells every worker to lower its scale.

        Args:
            tree: Means over this worker's batch: losses, gradients, metrics.

        Raises:
            ConfigError: There is no batch, an array is not of floating-point numbers, or the call is inside of jit.
            DisagreementError: The workers are in different iterations; nothing has been added up yet.
            WorkerLostError: A worker is gone.
        """
        if self._share is None:
            raise ConfigError("there is no batch to take a mean over: call mean inside the loop over session.epoch()")
        if any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves(tree)):
            raise ConfigError(
                "mean exchanges arrays with other processes, which jit cannot trace: call it outside of jit"
            )
        tree = jax.block_until_ready(tree)
        if self._since is not None:
            finite = _is_finite(jax.tree.leaves(tree))
            seconds = time.perf_counter() - self._since
            if self._compiling is not None:  # In the first iteration compiling is no part of the worker's speed.
                seconds, self._compiling = max(seconds - self._compiling.seconds, 0.0), None
            self._since = None
            self._balancer.report(seconds, finite=finite)
            self._share = self._balancer.share
            assert self._share is not None
            self._unaveraged = self._share.average is not None
        if self._balancer.scheme.period is not None:
            return tree if self._share.weight else jax.tree.map(jax.numpy.zeros_like, tree)
        return self._processes.mean(tree, self._share.weight)

    def average(self, tree: Tree) -> Tree:
        """Under `local-sgd`: the average of the workers' arrays where a period ends, by their samples since the last.

        Everywhere else, and under other schemes, the tree comes back as it is.

        Args:
            tree: All weights, and the optimizer's state, after the step. Integers, such as counts of steps, which are
                the same on all workers, come back as they are.

        Raises:
            ConfigError: There is no batch, or its gradient was not given to `mean`.
            WorkerLostError: A worker is gone.
        """
        if self._share is None or self._since is not None:
            raise ConfigError("call average inside the loop over session.epoch(), after mean and the optimizer's step")
        if self._share.average is None:
            return tree
        self._unaveraged = False
        leaves, form = jax.tree.flatten(tree)
        means = iter(self._processes.mean(list(filter(_is_floating, leaves)), self._share.average))
        return jax.tree.unflatten(form, [next(means) if _is_floating(each) else each for each in leaves])

    def weigh_by(self, count: Any) -> None:
        """As for any loader, before `mean`. With `pad` only what the mask leaves is counted."""
        share = self._share
        if share is not None and share.samples and self._pad is not None:
            count = count * len(share.positions) / share.samples  # The mask leaves no sample twice.
        self._balancer.weigh_by(count)

    def _padded(self, share: Share, pad: int) -> tuple[IntArray, Any]:
        """The share's indices, its last one repeated up to a multiple of `pad`, and which of them count."""
        real = share.samples or len(share.indices)  # All rows of a copy, whose weight is 0.
        rows = -(-real // pad) * pad
        if int(share.sizes.sum()) < self._global_batch_size:
            rows = max(rows, self._rows)
        self._rows = rows
        at = np.minimum(np.arange(rows), real - 1)
        return share.indices[at], np.arange(rows) < real

    def _batch(self, indices: IntArray) -> Any:
        """The samples with these indices, in the form of `data`."""
        return jax.tree.map(lambda each: _rows_of(each, indices), self._data)

    def _settled(self) -> Balancer:
        return self._balancer

    def _require_mean(self) -> None:
        if self._since is not None:
            raise ConfigError(
                "a batch was asked for before the mean over the last one: let the loop have gradients ="
                " session.mean(gradients) for each batch"
            )

    def _require_averaged(self) -> None:
        if self._unaveraged:
            raise ConfigError(
                f"the scheme {self._balancer.scheme.name!r} averages weights, and these were not averaged: let the loop"
                " have weights, state = session.average((weights, state)) after the optimizer's step"
            )


def _is_finite(leaves: list[Any]) -> bool:
    """Whether none of the arrays holds a NaN or an infinity."""
    together: dict[Any, list[Any]] = {}  # jit takes arrays of the same devices.
    for each in leaves:
        if jax.numpy.result_type(each) == jax.numpy.float16:
            return True
        together.setdefault(_devices_of(each), []).append(each)
    return all(bool(_all_finite(each)) for each in together.values())


def _devices_of(leaf: Any) -> frozenset[Any]:
    return frozenset(leaf.sharding.device_set if isinstance(leaf, jax.Array) else ())


_all_finite: Final = jax.jit(lambda leaves: jax.numpy.array([jax.numpy.isfinite(each).all() for each in leaves]).all())


def _is_floating(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.numpy.inexact))


def _require_initialised() -> None:
    """Refuse a process that has been started as one of several and knows nothing of the others."""
    started = next((name for name in _LAUNCHED if os.environ.get(name, "1") not in ("", "1")), None)
    if started is not None and not jax.distributed.is_initialized():
        raise ConfigError(
            f"{started} says that there are {os.environ[started]} processes, but this one does not know the others:"
            " call jax.distributed.initialize() first"
        )


def _in_steps(scheme: Scheme | str | None, pad: int | None, global_batch_size: object) -> Scheme | str | None:
    """The scheme, with sizes that are multiples of `pad` if they follow speeds and say nothing else of that.

    jit often compiles again for the second iteration, when weights come from the optimizer. Sizes that follow from the
    first one already, without its compilation, cost nothing then: there is no warm-up.
    """
    if scheme is None:
        scheme = LaunchSettings.from_environment(os.environ).asked_scheme()
    made = parse_scheme(scheme or DEFAULT)
    load = made.load
    if isinstance(load, Experts):
        load = replace(load, warmup=0, compiles=True)
    if pad is not None and load.follows_speed and load.multiple == 1:
        # The Balancer says what is wrong with a global batch that is not a number.
        fits = isinstance(global_batch_size, int) and global_batch_size % pad == 0
        load = replace(load, multiple=pad if fits else 1)
    return replace(made, load=load)


def _length_of(data: Any) -> int:
    """The rows that all arrays of the tree have; ConfigError if they cannot be indexed, or differ."""
    lengths = set()
    for each in (leaves := jax.tree.leaves(data, is_leaf=lambda each: isinstance(each, Iterator))):
        indexed = hasattr(each, "__getitem__") and hasattr(each, "__len__") and not isinstance(each, str | bytes)
        if not indexed or getattr(each, "shape", None) == ():
            raise ConfigError(
                f"data must be arrays with a row for each sample, which can be indexed, not {shown(each)}: read a"
                " stream into arrays, or give numpy.arange(length) and take the samples with the indices"
            )
        lengths.add(len(each))
    if len(lengths) != 1:
        found = "there are none" if not leaves else f"they have {', '.join(map(str, sorted(lengths)))}"
        raise ConfigError(f"the arrays of data must have equally many rows, one for each sample, but {found}")
    return lengths.pop()


def _rows_of(data: Any, indices: IntArray) -> Any:
    """The rows with these indices; ConfigError if the data returned something else."""
    rows = data[indices]
    for each in jax.tree.leaves(rows):
        if np.shape(each)[:1] != (len(indices),):
            raise ConfigError(
                f"data returned {shown(each)} of shape {list(np.shape(each))} for {len(indices)} indices: let its"
                " __getitem__ take an array of indices and return arrays with a row for each of them"
            )
    return rows

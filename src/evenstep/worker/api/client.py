"""`evenstep.Client`: training on parameter servers, for a training loop of any framework."""

import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Unpack, final

import msgspec

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger, Shares
from evenstep.core.samples import Share as Part
from evenstep.core.shown import shown
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE, read_secret
from evenstep.protocol.optimizer import OptimizerSpec, Options, plain_option, spec_of
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import Scheme
from evenstep.transport.address import Address
from evenstep.transport.connect import connect
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import Agreed
from evenstep.worker.api.loop import Loop, seconds_of
from evenstep.worker.api.setup import Asked, ShareOptions
from evenstep.worker.arguments import require_known
from evenstep.worker.loader_state import read_state
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.servers.arrays import Array, ArrayParameters, layout_of
from evenstep.worker.servers.exchange import Batch, ServedExchange
from evenstep.worker.servers.link import ServerLink


@final
class Client(Loop):
    """This worker's shares of each epoch, and its pushes of gradients to parameter servers, which step the optimizer.

        client = evenstep.Client(
            "ssp:bound=3", rank=r, workers=n, servers=addresses, secret=secret, weights=[...], optimizer="SGD",
            options={"lr": 0.1, "momentum": 0.9}, length=len(data), global_batch_size=512
        )
        for share in client.epoch(0):
            gradients = ...                 # of the mean loss over data[share.indices], at client.weights
            client.push(gradients)

    A worker computes on what it has claimed, and each position of an epoch is committed once. The servers weigh each
    push by its samples, so gradients are not multiplied by anything. The time from a share to its push counts as
    compute, unless `compute` or `report` say otherwise. Nothing here imports a framework.

    Args:
        scheme: A scheme on parameter servers, such as `"ssp:bound=3"`, `"dssp"` or `"asp:load=lb-bsp"`. None: the
            scheme of `evenstep run`.
        rank: This worker, 0 to `workers` - 1.
        workers: The number of workers.
        weights: The initial weights: arrays of float16, float32 or float64. The run starts from one worker's weights.
        optimizer: `SGD`, `Adam` or `AdamW`, or another that the servers know.
        options: The optimizer's options to set, by torch's names. `client.options` may be changed between pushes.
        length: Samples in an epoch.
        global_batch_size: Samples of one iteration of all workers together.
        servers: The addresses of each server (`start_servers(...).addresses`); None for the ones of `evenstep run`.
        secret: The servers' secret; None for the one in `EVENSTEP_SECRET`.
        timeout: Seconds to wait for another worker or a server before the run ends with an error that names it; 300
            by default.
        share_options: `drop_last`, `shuffle`, `seed`, `smallest_batch`, `largest_batch` and `run_dir`, as for
            `evenstep.Balancer`.

    Raises:
        ConfigError: Something asked for cannot work on this worker or on another, which is named.
        DisagreementError: The workers were started with different schemes, lengths, weights, options or seeds.
        WorkerLostError: Not all workers came in time, or the servers are gone.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        rank: int,
        workers: int,
        weights: Sequence[Array],
        optimizer: str = "SGD",
        options: Mapping[str, object] | None = None,
        length: int,
        global_batch_size: int,
        servers: Sequence[Sequence[str]] | None = None,
        secret: str | None = None,
        timeout: float | None = None,
        **share_options: Unpack[ShareOptions],
    ) -> None:
        require_known(share_options, ShareOptions.__annotations__, "Client")
        launched = LaunchSettings.from_environment(os.environ)
        addresses = _addresses(launched.servers if servers is None else servers)
        asked = Asked.of(
            launched,
            lambda given: _check(given, len(addresses), weights, optimizer, options),
            scheme=scheme,
            rank=rank,
            workers=workers,
            length=length,
            global_batch_size=global_batch_size,
            **share_options,
        )
        worker = asked.worker
        activity, timeout_seconds = Activity(), launched.timeout_seconds(timeout)
        secret = os.environ.get(SECRET_VARIABLE) if secret is None else secret
        if not addresses or not secret:
            raise ConfigError(
                "there are no servers to join: start the script with evenstep run and a scheme on servers, such as"
                " --scheme ssp, or give servers= and secret= of evenstep.start_servers"
            )
        key = read_secret(secret)
        self._link = ServerLink(
            asked.rank,
            lambda shard: connect(addresses[shard], secret=key),
            len(addresses),
            timeout_seconds=timeout_seconds,
            activity=activity,
        )
        try:
            agreed = asked.agree(self._meet)
            super().__init__(asked, agreed, worker, activity)
            self._start(agreed, weights, _spec(optimizer, options))
        except BaseException:
            self._link.close()
            raise

    def _meet(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "error" in record:
            self._link.shards[0].reach()  # If the others cannot be told, this worker does not wait for them either.
        records = self._link.meet(json.dumps(record).encode())
        if len(records) != record.get("workers", len(records)):
            raise ConfigError(
                f"the servers were started for {len(records)} workers and this one was told of {record['workers']}:"
                " give start_servers and every Client the same workers="
            )
        return [json.loads(each) for each in records]

    def _start(self, agreed: Agreed, weights: Sequence[Array], spec: OptimizerSpec) -> None:
        """Describe the run to the servers, and take this worker's place there."""
        served, layout = agreed.scheme.served, layout_of(weights)
        assert served is not None
        layouts = layout.shards(served.servers)
        run = RunSpec(
            scheme=agreed.scheme,
            problem=agreed.problem,
            length=self._asked.length,
            drop_last=self._asked.drop_last,
            layout=layout,
            optimizers=(spec,),
        )
        self._link.start(run.encode(), [each.nbytes for each in layouts])
        overlaps = served.exchange == "overlapped"
        self._parameters = ArrayParameters(weights, layouts, self._link)
        self._optimizer = _Optimizer(self._link, spec)
        self._batch: Batch | None = None
        self._pass = ServedExchange(
            self._link,
            self._tracker,
            self._parameters,
            self._optimizer,
            nonfinite=NonfiniteGuard(served.nonfinite, self._tracker),
            overlaps=overlaps,
            ahead=1 if overlaps else 0,
        )

    @property
    def weights(self) -> list[Array]:
        """The current weights, read-only; newer ones, with a share or after a push, arrive in the same memory."""
        return self._parameters.weights

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options, which may be changed: `client.options["lr"] = 0.01`. The next push sends them."""
        return self._optimizer.values

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Wrap this worker's own compute of a share, if the script does other things too before it pushes."""
        self._require_batch()
        self._stopwatch.drop()
        self._stopwatch.run()
        try:
            yield
        finally:
            self._stopwatch.pause()

    def report(self, seconds: float) -> None:
        """Report the seconds of this worker's own compute, instead of the time from the share to its push."""
        seconds = seconds_of(seconds)
        self._require_batch()
        self._stopwatch.restart()
        self._stopwatch.drop()
        self._stopwatch.add(seconds)

    def push(self, gradients: Sequence[Array]) -> list[Array] | None:
        """Push the gradients of the mean loss over the share, and wait until the scheme lets this worker go on.

        Args:
            gradients: One for each weight, in the same order and of the same shapes.

        Returns:
            The current weights, or None if no newer ones have come.

        Raises:
            ConfigError: There is no current share, or the gradients have other shapes.
            WorkerLostError: The servers are gone.
        """
        batch, now = self._require_batch(), self._tracker.iteration
        assert now is not None
        self._tracker.compute_ends()
        taken = self._parameters.taken
        samples, put = now.share.samples, partial(self._parameters.put_gradients, gradients)
        self._pass.push(now, batch, put, samples=samples, units=samples)
        self._batch = None
        self._tracker.mark(Doing.STEPPED)
        return self.weights if self._parameters.taken > taken else None

    def close(self) -> None:
        """Leave the servers, and end the record of this worker. Otherwise that happens when the script ends."""
        super().close()
        self._link.close()

    def _require_batch(self) -> Batch:
        self._require_unclosed()
        if self._batch is None:
            raise ConfigError("there is no current share: push once for each share of client.epoch()")
        return self._batch

    def _finish(self) -> None:
        if self._batch is not None and not self._pass.forfeited(self._batch):
            raise ConfigError("a share was not pushed: call client.push(gradients) once for each share")

    def _enter(self) -> None:
        self._tracker.enter_loader()
        self._pass.record()

    def _shares(self, ledger: Ledger) -> Shares:
        return self._pass.start(self._at.epoch)

    def _begin(self, part: Part) -> None:
        super()._begin(part)
        self._batch = self._pass.hand_out(part.iteration)

    def _leave(self) -> None:
        super()._leave()
        self._batch = None
        self._pass.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the basis of the sizes and the optimizer's state, one `bytes` per server; not the weights.

        Call it between epochs: within one only the servers know which samples are finished, so this state would repeat
        the epoch, with a warning.
        """
        if not self._pass.over:
            warnings.warn(
                "in the middle of an epoch only the servers know which samples are done with, so this state repeats the"
                " epoch: save between epochs",
                stacklevel=2,
            )
        self._pass.settle()
        return {
            **super().state_dict(),
            "optimizer": [bytes(each) for each in self._pass.persist(self._link.fetch_states)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, before the first epoch, with the weights of that time given to the constructor.

        Raises:
            ConfigError: The state is damaged, of another run or number of servers, or an epoch has begun.
        """
        if self._loops:
            raise ConfigError("load_state_dict comes too late: call it before the first epoch")
        read_state(state)
        encoded = state.get("optimizer")
        if not isinstance(encoded, list) or not all(isinstance(each, bytes) for each in encoded):
            raise ConfigError("this state has no optimizer's state: give what a client's state_dict() returned")
        if len(encoded) != len(self._link.shards):
            raise ConfigError(
                f"this state is of {len(encoded)} servers and not of {len(self._link.shards)}: resume with as many"
            )
        super().load_state_dict(state)
        self._optimizer.pending = encoded


@final
class _Optimizer:
    """The options of the optimizer, whose updates the servers compute, and the state from which they are to begin."""

    def __init__(self, link: ServerLink, spec: OptimizerSpec) -> None:
        self.values: dict[str, Any] = dict(spec.groups[0])
        self.pending: list[bytes] | None = None
        self._link = link
        self._known = set(self.values)

    def options(self) -> tuple[Options, ...]:
        if self.values.keys() != self._known:
            odd = ", ".join(sorted(self.values.keys() ^ self._known))
            raise ConfigError(f"client.options must keep its names, but {odd} came or went: give them to the Client")
        return ({name: plain_option(name, value) for name, value in self.values.items()},)

    def hand_over(self) -> None:
        """Send the state to the servers, if there is one."""
        if self.pending is not None:
            self._link.load_states([[memoryview(each)] for each in self.pending])

    def clear(self) -> None:
        """Forget the state, which the servers have."""
        self.pending = None


def _addresses(servers: object) -> list[list[str]]:
    """Return the addresses of each server; ConfigError if they are something else."""
    try:
        lists = msgspec.convert(servers, list[list[str]])
    except msgspec.ValidationError:
        raise ConfigError(
            "servers takes a list of addresses for each server, as start_servers(...).addresses is one, not"
            f" {shown(servers)}"
        ) from None
    for text in chain.from_iterable(lists):
        Address.parse(text)
    return lists


def _check(
    scheme: Scheme, servers: int, weights: Sequence[Array], optimizer: object, options: object
) -> Mapping[str, Any]:
    """Refuse what a `Client` cannot run; returns what must agree of the weights and the optimizer."""
    if scheme.served is None:
        raise ConfigError(f"the scheme {scheme.name!r} needs no parameter servers: use evenstep.Balancer")
    if scheme.period is not None:
        raise ConfigError(f"the local steps of {scheme.name!r} run on PyTorch only: leave out period here")
    if scheme.served.wire != "float32":
        raise ConfigError(f"the narrow wire of {scheme.name!r} runs on PyTorch only: leave out wire here")
    if scheme.served.servers != servers:
        raise ConfigError(
            f"the scheme asks for {scheme.served.servers} servers but {servers} were started: give start_servers or the"
            " launcher the same scheme"
        )
    spec = _spec(optimizer, options)
    set_to = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in spec.groups[0].items()
    )
    forms = ", ".join(f"{each.dtype} {list(each.shape)}" for each in layout_of(weights).parameters)
    return {"weights": _short(forms), "optimizer": _short(f"{spec.name}({set_to})")}


def _spec(optimizer: object, options: object) -> OptimizerSpec:
    options = {} if options is None else options
    if not isinstance(optimizer, str) or not isinstance(options, Mapping):
        raise ConfigError(
            f"optimizer takes a name such as 'SGD', and options a dict, not {shown(optimizer)} and {shown(options)}"
        )
    return spec_of(optimizer, options)


def _short(text: str) -> str:
    """Return a text that workers compare word by word, or the beginning and a checksum of a long one."""
    return text if len(text) <= 200 else f"{text[:200]}... (checksum {zlib.crc32(text.encode()):08x})"

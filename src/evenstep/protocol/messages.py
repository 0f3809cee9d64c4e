"""The messages between a worker and a server.

Some messages are followed by a payload of bytes (gradients, weights, records), which the class's docstring describes.
"""

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from evenstep.core.activity import Doing
from evenstep.core.values import Reports
from evenstep.protocol.encoding import Count, Incarnation, Record, Sequence, Version
from evenstep.protocol.optimizer import Finite, Options

MAX_COST: Final = 2**31
"""The highest cost of one sample."""
COST_BYTES: Final = 4
"""The bytes of the cost of one position."""
MAX_ROUNDS: Final = 8
"""The most rounds of the rendezvous."""

Row: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], ...],
    Meta(min_length=Reports.columns(), max_length=Reports.columns()),
]

# From a worker.


class Initialise(Record, frozen=True, kw_only=True):
    """The payload is the initial weights, which an answer with `SendWeights` asked for."""


class Begin(Record, frozen=True, kw_only=True):
    """Begin a pass over the data.

    If samples differ in cost, the payload is the cost of each position of the pass, as little-endian integers of 4
    bytes, from 1 to `MAX_COST`.

    Attributes:
        ahead: The number of claims to hold in addition to the current one.
        mean: The cost of an average sample of the dataset; None if all samples cost alike.
    """

    number: Count
    epoch: Count
    ahead: Annotated[int, Meta(ge=0, le=1)]
    mean: Annotated[int, Meta(ge=1, le=MAX_COST)] | None = None


class PushGradients(Record, frozen=True, kw_only=True):
    """The payload is the gradient of a claim; there is none if `samples` is 0.

    The worker is finished with its older claims: the gradient was computed on them too, or the script skipped them.

    Attributes:
        weights: The version of the weights on which the gradient was computed.
        row: The worker's row of `Reports`.
        norm: The norm of the gradient over all shards.
        options: The options of each param group, if they have changed since the last push.
    """

    claim: Count
    weights: Count
    samples: Annotated[int, Meta(ge=0, le=2**31)]
    units: Annotated[float, Meta(ge=0, le=2**53)]
    row: Row
    norm: Finite
    options: Annotated[tuple[Options, ...], Meta(min_length=1)] | None = None


class More(Record, frozen=True, kw_only=True):
    """Claim samples until the worker holds `ahead` claims in addition to the oldest. The answer has no weights."""

    ahead: Annotated[int, Meta(ge=1, le=2**31)]


class Rest(Record, frozen=True, kw_only=True):
    """Wait for claims, or for the end of the pass.

    Attributes:
        done: The worker is finished with its claims up to this one; others go back. None: all go back.
        ended: The worker's loop has ended, so it takes no more claims.
    """

    done: Count | None = None
    ended: bool = False


class Stop(Record, frozen=True, kw_only=True):
    """Leave the loop before the pass has ended."""


RequestBody: TypeAlias = Initialise | Begin | PushGradients | More | Rest | Stop


class NumberedRequest(Record, frozen=True, kw_only=True):
    """A request to shard 0. The `NumberedReply` has the same sequence. `has`: the version of the worker's weights."""

    sequence: Sequence
    has: Version
    body: RequestBody


class Stage(Record, frozen=True, kw_only=True):
    """To the other shards, before a push or initial weights go to shard 0. The payload is the shard's part."""

    sequence: Sequence


class Again(Record, frozen=True, kw_only=True):
    """Repeat the answer to this request."""

    sequence: Sequence


class Ping(Record, frozen=True, kw_only=True):
    """A worker's pulse, with the activity of its main thread. `echo` asks for a `Pong`."""

    doing: Doing
    iteration: Version
    seconds: Finite
    echo: bool = False


class Meet(Record, frozen=True, kw_only=True):
    """The payload is this worker's record for a round of the rendezvous.

    `known`: the worker already has the records of the others. `process`: its host and process.
    """

    rank: Count
    round: Annotated[int, Meta(ge=0, lt=MAX_ROUNDS)]
    known: bool = False
    process: Annotated[str, Meta(max_length=300)] = ""


class Absent(Record, frozen=True, kw_only=True):
    """Ask which workers are missing at the rendezvous."""


class Start(Record, frozen=True, kw_only=True):
    """Take a place at the server; the payload is the `RunSpec`.

    Attributes:
        incarnation: The former incarnation of the worker, or -1.
        has: The version of the worker's weights.
        timeout: How many seconds the worker may keep others waiting.
    """

    rank: Count
    incarnation: Incarnation
    has: Version
    timeout: Finite


class Goodbye(Record, frozen=True, kw_only=True):
    """The worker has finished."""


class States(Record, frozen=True, kw_only=True):
    """Ask for the optimizer state; also the answer, whose payload is that state (`tensors.states`)."""


class LoadStates(Record, frozen=True, kw_only=True):
    """The payload is the state from which the optimizer has to continue."""


class Follow(Record, frozen=True, kw_only=True):
    """From shard 0: from now on each message on this connection is a `Command`."""


class ServeGroup(Record, frozen=True, kw_only=True):
    """From a group server: from now on each message on this connection is a `FromGroup`."""


Asked: TypeAlias = (
    NumberedRequest | Stage | Again | Ping | Meet | Absent | Start | Goodbye | States | LoadStates | Follow | ServeGroup
)


# From a server.


class SendWeights(Record, frozen=True, kw_only=True):
    """The run has no weights yet; the worker must send its own with `Initialise`."""


class Grant(Record, frozen=True, kw_only=True):
    """The worker may run.

    Attributes:
        claims: The number and the ranges [start, stop) of each new claim.
        over: Whether the pass has ended.
        lead, bound, held: After a hold: the worker's lead, its limit, and the seconds for which the worker was held.
        staleness, behind, share: From the commit of the worker's last push.
        sizes: The batch sizes of all workers, if they have changed.
    """

    claims: tuple[tuple[Count, tuple[tuple[Count, Count], ...]], ...]
    over: bool
    lead: int | None = None
    bound: int | None = None
    held: Finite = 0.0
    staleness: Count | None = None
    behind: Finite | None = None
    share: Finite | None = None
    sizes: tuple[Count, ...] | None = None


class NumberedReply(Record, frozen=True, kw_only=True):
    """The answer to a `NumberedRequest`, from shard 0. If it comes with weights, every shard sends one, without a body.

    `weights`: the weights of `version` are the payload, or in shared memory. `narrow`: the payload is what takes the
    weights that the worker has to those, rounded (`tensors.narrow`).
    """

    sequence: Sequence
    weights: bool
    version: Version
    narrow: bool = False
    body: SendWeights | Grant | None = None


class Refusal(Record, frozen=True, kw_only=True):
    """The request failed with this error. `kind` is its class; `sequence` is 0 if the request had none."""

    sequence: Count
    error: str
    kind: str


class Staged(Record, frozen=True, kw_only=True):
    """The gradients of this request are staged."""

    sequence: Sequence


class Resend(Record, frozen=True, kw_only=True):
    """The request did not arrive and must be sent again."""

    sequence: Sequence


class Pending(Record, frozen=True, kw_only=True):
    """The request waits for other workers. `events` counts the events at the server."""

    sequence: Sequence
    events: Count


class Pong(Record, frozen=True, kw_only=True):
    """The echo of a `Ping`."""


class Met(Record, frozen=True, kw_only=True):
    """The payload is the records of all workers by rank, with these lengths in bytes."""

    lengths: tuple[Count, ...]


class Missing(Record, frozen=True, kw_only=True):
    """Some of the workers that are missing at the rendezvous."""

    ranks: tuple[Count, ...]


class Placed(Record, frozen=True, kw_only=True):
    """The worker has a place. On one host, the shared memory of both buffers comes as an open file.

    `nbytes` is the length of a message of gradients or weights; `heartbeat` is in seconds.
    """

    incarnation: Incarnation
    heartbeat: Finite
    nbytes: Count
    version: Version


class Loaded(Record, frozen=True, kw_only=True):
    """The optimizer has loaded the state."""


Answered: TypeAlias = (
    NumberedReply | Refusal | Staged | Resend | Pending | Pong | Met | Missing | Placed | States | Loaded
)

ASKED: Final = msgspec.msgpack.Decoder(Asked)
ANSWERED: Final = msgspec.msgpack.Decoder(Answered)

"""The messages between a group server and its parent."""

from typing import Final, TypeAlias

import msgspec
from msgspec import Raw

from evenstep.protocol.encoding import Count, Record
from evenstep.protocol.messages import Refusal
from evenstep.protocol.optimizer import Finite


class FromLine(Record, frozen=True, kw_only=True):
    """A message of the worker behind this line, with its payload."""

    line: Count
    message: Raw


class Together(Record, frozen=True, kw_only=True):
    """Requests of several workers with one gradient, their mean.

    The payload is the encoded requests, with these `lengths`, followed by the gradient.
    """

    number: Count
    lines: tuple[Count, ...]
    lengths: tuple[Count, ...]


class LineEnded(Record, frozen=True, kw_only=True):
    """The worker has left. `hung`: the seconds for which it kept its group waiting, if it was given up for that."""

    line: Count
    hung: Finite | None = None


FromGroup: TypeAlias = FromLine | Together | LineEnded


class ToLine(Record, frozen=True, kw_only=True):
    """An answer to the worker behind this line, with its payload. Weights travel once for all lines."""

    line: Count
    message: Raw


class LineClosed(Record, frozen=True, kw_only=True):
    """The parent has given the worker up."""

    line: Count


class TogetherRefused(Record, frozen=True, kw_only=True):
    """A worker whose gradient is in the mean has left. The other gradients must be sent again."""

    number: Count


ToGroup: TypeAlias = ToLine | LineClosed | TogetherRefused | Refusal

FROM_GROUP: Final = msgspec.msgpack.Decoder(FromGroup)
TO_GROUP: Final = msgspec.msgpack.Decoder(ToGroup)

"""Encodes messages as MessagePack records, and checks the types and ranges of the records that it decodes."""

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from evenstep.core.errors import ProtocolError
from evenstep.transport.base import ConnectionLostError

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Version: TypeAlias = Annotated[int, Meta(ge=-1, le=2**62)]
"""A version of the weights; -1 if there are none yet."""
Incarnation: TypeAlias = Version
Sequence: TypeAlias = Annotated[int, Meta(ge=1, le=2**62)]
"""Numbers a worker's requests within an incarnation."""

_Decoded = TypeVar("_Decoded")


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="op", tag=True
):
    """A message. The name of its class travels with it, as `op`."""


class _Numbered(msgspec.Struct):
    sequence: Sequence


_ENCODER: Final = msgspec.msgpack.Encoder()
_NUMBERED: Final = msgspec.msgpack.Decoder(_Numbered)


def encode(message: Record) -> bytes:
    """Encode a message as the header that `Connection.send` takes."""
    return _ENCODER.encode(message)


def decode(decoder: "msgspec.msgpack.Decoder[_Decoded]", header: bytes) -> _Decoded:
    """Decode a header with the decoder of the messages that may arrive here.

    Raises:
        ProtocolError: The operation is unknown, or a field is missing, unknown or out of range.
        ConnectionLostError: The bytes are not MessagePack.
    """
    try:
        return decoder.decode(header)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"invalid message ({error}): install the same version of evenstep everywhere") from error
    except (ValueError, RecursionError) as error:
        raise ConnectionLostError(f"the peer sent a header that is not MessagePack: {error}") from error


def sequence_of(header: bytes) -> int:
    """Return the sequence of a request that may be invalid otherwise; 0 if it has none."""
    try:
        return _NUMBERED.decode(header).sequence
    except (ValueError, RecursionError):
        return 0

"""Serializes optimizer state by parameter: a list of the entries as JSON, then the bytes of the tensors."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from evenstep.core.errors import ProtocolError
from evenstep.protocol.optimizer import State
from evenstep.tensors.messages import DTYPES, memory_of

_LENGTH: Final = struct.Struct("!Q")


def encode_states(states: Iterable[tuple[str, State]]) -> list[memoryview]:
    """Encode states as a payload, in pieces that view the tensors. Scalar tensors become numbers."""
    listed: list[list[object]] = []
    pieces: list[memoryview] = []
    for name, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                flat = value.detach().to("cpu").contiguous()
                listed.append([name, key, str(value.dtype).removeprefix("torch."), list(value.shape)])
                if flat.numel():
                    pieces.append(memory_of(flat.view(-1).view(torch.uint8)))
            else:
                listed.append([name, key, None, float(value)])  # type: ignore[arg-type]
    text = json.dumps(listed).encode()
    return [memoryview(_LENGTH.pack(len(text)) + text), *pieces]


def decode_states(payload: bytearray) -> dict[str, dict[str, object]]:
    """Invert `encode_states`, with copies of the tensors; ProtocolError if the payload is malformed."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        listed: list[Any] = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
        end = _LENGTH.size + length
        states: dict[str, dict[str, object]] = {}
        for name, key, dtype, what in listed:
            if dtype is None:
                states.setdefault(str(name), {})[str(key)] = torch.tensor(float(what))
                continue
            shape = [int(size) for size in what]
            nbytes = math.prod(shape) * DTYPES[dtype].itemsize
            if min(shape, default=0) < 0 or end + nbytes > len(payload):
                raise ProtocolError("an optimizer state lists more than came with it")
            tensor = torch.empty(shape, dtype=DTYPES[dtype])
            if nbytes:
                memory_of(tensor.view(-1).view(torch.uint8))[:] = payload[end : end + nbytes]
            states.setdefault(str(name), {})[str(key)] = tensor
            end += nbytes
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"an optimizer state came in no form that can be read ({error!r})") from error
    return states


def by_shard(states: Mapping[str, State], names: Iterable[Iterable[str]]) -> list[list[tuple[str, State]]]:
    """Group the states by the shards of their parameters."""
    return [[(name, states[name]) for name in shard if name in states] for shard in names]

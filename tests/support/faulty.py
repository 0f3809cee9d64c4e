"""A connection that loses, repeats, delays and swaps whole messages on purpose."""

import hashlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self, TypeAlias, final

from evenstep.core.errors import ConfigError
from evenstep.transport.base import Connection, Message
from evenstep.transport.codec import as_bytes, close_files

_DRAWS: Final = 2.0**64


class Fault(Enum):
    """A fault of one message."""

    DROP = "drop"
    """It never arrives."""
    DUPLICATE = "duplicate"
    """It arrives twice."""
    DELAY = "delay"
    """It arrives after several later messages."""
    REORDER = "reorder"
    """It changes places with the next message."""


_TIMES: Final[Mapping[Fault | None, int]] = {Fault.DROP: 0, Fault.DUPLICATE: 2}

FaultPlan: TypeAlias = Callable[[int], Fault | None]
"""The fault of message `number`, counted from 0 over the messages sent on one connection."""


def scripted(faults: Mapping[int, Fault]) -> FaultPlan:
    """These faults for these messages; the others arrive as they are."""
    return dict(faults).get


def seeded(seed: int, rates: Mapping[Fault, float]) -> FaultPlan:
    """Each fault for this share of the messages, drawn from the seed and the message's number only."""
    if min(rates.values(), default=0.0) < 0.0 or sum(rates.values()) > 1.0:
        raise ConfigError(
            f"messages cannot suffer faults at {dict(rates)}: use rates of at least 0 that sum to at most 1"
        )

    def plan(number: int) -> Fault | None:
        digest = hashlib.blake2b(struct.pack("<QQ", seed, number), digest_size=8).digest()
        draw = int.from_bytes(digest, "little") / _DRAWS
        for fault, rate in rates.items():
            if draw < rate:
                return fault
            draw -= rate
        return None

    return plan


def never_in_a_row(plan: FaultPlan) -> FaultPlan:
    """The same without two neighbouring messages of which neither arrives in its place: no line is silent for long."""

    def spared(number: int) -> Fault | None:
        fault, before = plan(number), plan(number - 1) if number else None
        return fault if Fault.DUPLICATE in (fault, before) or before is None else None

    return spared


@final
class Faulty:
    """A `Connection` whose sent messages suffer faults; received messages are not touched.

    `fired` counts the faults so far. A delayed message leaves after `later` further ones (a reordered one after 1), or
    at `release`. If neither happens, it never arrives.
    """

    def __init__(self, connection: Connection, plan: FaultPlan, *, later: int = 3) -> None:
        self.local = connection.local
        self.fired: Counter[Fault] = Counter()
        self._connection = connection
        self._plan = plan
        self._later = later
        self._sending = threading.Lock()
        self._sent = 0
        self._held: list[_Held] = []

    def send(self, header: bytes, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        with self._sending:
            number = self._sent
            self._sent += 1
            fault = self._plan(number)
            if fault is not None:
                self.fired[fault] += 1
            if fault in (Fault.DELAY, Fault.REORDER):
                after = number + (self._later if fault is Fault.DELAY else 1)
                self._held.append(_Held.of(header, payload, files, after=after))
            else:
                for _ in range(_TIMES.get(fault, 1)):
                    self._connection.send(header, *payload, files=files, wait=wait)
            self._release([held for held in self._held if held.after <= number])

    def release(self) -> None:
        """Send the delayed messages, in the order in which they would have left."""
        with self._sending:
            self._release(sorted(self._held, key=lambda held: held.after))

    def receive(self, timeout: float | None = None) -> Message:
        return self._connection.receive(timeout)

    def receive_payload(self, *buffers: memoryview) -> None:
        self._connection.receive_payload(*buffers)

    def close(self) -> None:
        self._connection.close()
        with self._sending:
            for held in self._held:
                close_files(held.files)
            self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self, leaving: list["_Held"]) -> None:
        for held in leaving:
            self._held.remove(held)
            try:
                self._connection.send(held.header, *(memoryview(part) for part in held.payload), files=held.files)
            finally:
                close_files(held.files)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """A copy of a message that leaves after the message of number `after`."""

    header: bytes
    payload: tuple[bytes, ...]
    files: tuple[int, ...]
    after: int

    @classmethod
    def of(cls, header: bytes, payload: Sequence[memoryview], files: Sequence[int], *, after: int) -> Self:
        copies = tuple(bytes(as_bytes(buffer)) for buffer in payload)
        return cls(header=header, payload=copies, files=tuple(map(os.dup, files)), after=after)

"""The global generators of Python, NumPy and torch (CPU): their states, and seeds that follow from a key."""

import ctypes
import pickle
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import numpy as np
import torch

_STATE_BYTES: Final = 4 * (624 + 1)
"""The words of a Mersenne Twister of 32 bits, and its place in them."""

_MARK_BYTES: Final = 64
"""So many bytes tell its states apart: the place moves with each number, and then all words do."""


@final
@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of a generator. `mark` differs once something was drawn; `whole` is what to go back to."""

    mark: Any
    whole: Any = field(compare=False)


class GlobalGenerator(Protocol):
    """One generator that a whole process shares.

    To copy a state takes as long as fetching several samples, so it is copied only if its mark has changed.
    """

    def state(self) -> GeneratorState:
        """Its state."""

    def restore(self, state: GeneratorState, /) -> None:
        """Put it back."""

    def seed(self, seed: int, /) -> None:
        """Seed it with 63 bits."""


@final
class PythonRandom:
    """That of the module `random`.

    The mark is read where CPython keeps the words: behind the object's header, the place first. Where it is not found
    there, it is all that `getstate` returns.
    """

    def __init__(self) -> None:
        self._own: Any = random.random.__self__  # type: ignore[attr-defined]
        self._last: GeneratorState | None = None
        self._memory: ctypes.Array[ctypes.c_uint32] | None = None
        header, whole = object.__basicsize__, random.Random.__mro__[1].__basicsize__
        if whole - header >= _STATE_BYTES:
            place, *words = (ctypes.c_uint32 * (_STATE_BYTES // 4)).from_address(id(self._own) + header)
            if (*words, place) == self._own.getstate()[1]:
                self._memory = (ctypes.c_uint32 * (_MARK_BYTES // 4)).from_address(id(self._own) + header)

    def state(self) -> GeneratorState:
        if self._memory is None:
            state = self._own.getstate()
            return GeneratorState(state, state)
        mark = bytes(self._memory), self._own.gauss_next
        if self._last is None or self._last.mark != mark:
            self._last = GeneratorState(mark, self._own.getstate())
        return self._last

    def restore(self, state: GeneratorState, /) -> None:
        self._own.setstate(state.whole)
        self._last = state

    def seed(self, seed: int, /) -> None:
        self._own.seed(seed)


@final
class NumPyRandom:
    """That of `numpy.random`.

    The mark is read at the address that NumPy gives, from the end of the words. The number that `randn` may keep for
    its next call is not there. There is none as long as the mark is one with which there was none.
    """

    def __init__(self) -> None:
        self._last: GeneratorState | None = None
        self._generator: Any = None
        self._memory: ctypes.Array[ctypes.c_uint32] | None = None

    def state(self) -> GeneratorState:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:  # `numpy.random.set_bit_generator` changes it.
            self._generator, self._last = generator, None
            self._memory = _end_of_words(generator) if type(generator) is np.random.MT19937 else None
        if self._memory is None:
            state = np.random.get_state(legacy=False)
            return GeneratorState(pickle.dumps(state), state)
        mark = bytes(self._memory)
        if self._last is None or self._last.mark != (mark, 0, 0.0):
            *_, kept, gauss = whole = np.random.get_state()
            if self._last is None or self._last.mark != (mark, kept, gauss):
                self._last = GeneratorState((mark, kept, gauss if kept else 0.0), whole)
        return self._last

    def restore(self, state: GeneratorState, /) -> None:
        np.random.set_state(state.whole)
        self._last = state

    def seed(self, seed: int, /) -> None:
        np.random.seed(seed & 0xFFFFFFFF)


def _end_of_words(generator: np.random.MT19937) -> "ctypes.Array[ctypes.c_uint32]":
    end = generator.ctypes.state_address + _STATE_BYTES
    return (ctypes.c_uint32 * (_MARK_BYTES // 4)).from_address(end - _MARK_BYTES)


@final
class TorchRandom:
    """That of torch on the CPU, whose whole state is quickly copied."""

    def __init__(self) -> None:
        self._last: GeneratorState | None = None

    def state(self) -> GeneratorState:
        whole = torch.default_generator.get_state()
        mark = whole.numpy().tobytes()
        if self._last is None or self._last.mark != mark:
            self._last = GeneratorState(mark, whole)
        return self._last

    def restore(self, state: GeneratorState, /) -> None:
        torch.default_generator.set_state(state.whole)
        self._last = state

    def seed(self, seed: int, /) -> None:
        torch.default_generator.manual_seed(seed)


@final
class Generators:
    """All of them. Each is spoken of by its place among them, 0 to 2."""

    def __init__(self) -> None:
        self._all: tuple[GlobalGenerator, ...] = (PythonRandom(), NumPyRandom(), TorchRandom())

    def states(self) -> list[GeneratorState]:
        """The states of all."""
        return [each.state() for each in self._all]

    def moved(self, since: list[GeneratorState]) -> set[int]:
        """Those that something drew from since they had these states."""
        now = self.states()
        return set() if now == since else {n for n, state in enumerate(since) if state != now[n]}

    def restore(self, states: list[GeneratorState]) -> None:
        """Put back those that have moved since they had these states."""
        for number in self.moved(states):
            self._all[number].restore(states[number])

    def seed(self, numbers: Collection[int], *key: int) -> None:
        """Seed these from the key."""
        seed = mixed(*key)
        for number in numbers:
            self._all[number].seed(seed)


@contextmanager
def seeded_randomness(*key: int) -> Iterator[None]:
    """Inside, all start from the key; afterwards they are restored."""
    generators = Generators()
    before = generators.states()
    generators.seed((0, 1, 2), *key)
    try:
        yield
    finally:
        generators.restore(before)


def mixed(*key: int) -> int:
    """63 bits of the key: SplitMix64's finaliser over its parts."""
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1

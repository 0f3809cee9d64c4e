"""A checkpoint is made from the fields of a dataclass that its constructor does not take."""

import json
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import Factors, IntArray, Sample


class Pair(NamedTuple):
    left: int
    right: Factors


@dataclass
class Inner(Stateful):
    step: int
    count: int = field(init=False, default=0)


@dataclass
class Outer(Stateful):
    rate: float
    inner: Inner
    name: str = field(init=False, default="")
    sizes: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    recent: deque[Sample] = field(init=False, default_factory=lambda: deque(maxlen=2))
    pairs: list[Pair] = field(init=False, default_factory=list)
    last: Sample | None = field(init=False, default=None)
    _hidden: bool = field(init=False, default=False)


class Plain(Stateful):
    def __init__(self):
        self.count = 3


def test_what_the_constructor_does_not_take_goes_through_json():
    one, other = Outer(0.5, Inner(2)), Outer(0.25, Inner(7))
    one.inner.count, one.name, one._hidden = 4, "seen", True
    one.sizes = np.array([3, 2**40])
    one.recent.extend(Sample(samples, 0.5) for samples in (1.0, 2.0, 3.0))
    one.pairs.append(Pair(1, Factors(cpu_availability=0.25)))
    one.last = Sample(8, 0.1)
    state = one.state_dict()
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == state
    assert (other.rate, other.inner.step) == (0.25, 7)
    assert (other.inner.count, other.name, other._hidden, other.last) == (4, "seen", True, one.last)
    assert other.sizes.dtype == np.int64
    assert other.sizes.tolist() == [3, 2**40]
    assert (other.recent, other.recent.maxlen) == (one.recent, 2)
    assert other.pairs == one.pairs


def test_none_stays_none():
    one, other = Outer(0.5, Inner(2)), Outer(0.5, Inner(2))
    other.last = Sample(1, 1.0)
    other.load_state_dict(one.state_dict())
    assert other.last is None


def test_a_class_that_is_no_dataclass_has_no_state():
    plain = Plain()
    assert plain.state_dict() == {}
    plain.load_state_dict({})
    assert plain.count == 3

"""A cluster in virtual time, for the tests of load: a policy as the shells drive it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from evenstep.core.load import Experts, Load
from evenstep.core.values import UNLIMITED, Problem, Reports

Seconds = Callable[[int, int, int], float]
"""Compute seconds of (worker, iteration, samples)."""


class Run(Protocol):
    """Trains in virtual time; returns sizes and compute seconds, each of shape [iterations, workers]."""

    def __call__(
        self, workers: int, batch: int, iterations: int, seconds: Seconds, *, load: Load | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]: ...


def reports_of(samples: Sequence[int], seconds: Sequence[float]) -> Reports:
    """An iteration of these samples, which took so long."""
    nothing = np.zeros(len(samples), dtype=np.int64)
    return Reports(
        samples=np.array(samples, dtype=np.int64),
        compute_microseconds=np.rint(1e6 * np.array(seconds)).astype(np.int64),
        forecast=nothing,
        largest_size=nothing + UNLIMITED,
    )


def run(
    workers: int, batch: int, iterations: int, seconds: Seconds, *, load: Load | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    policy = (load or Experts()).policy(workers)
    problem = Problem(
        global_batch_size=batch,
        minimum=np.ones(workers, dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    all_sizes, all_times = [], []
    for k in range(iterations):
        sizes = policy.allocate(problem).sizes
        times = [seconds(i, k, int(sizes[i])) for i in range(workers)]
        policy.observe(reports_of(sizes.tolist(), times))
        all_sizes.append(sizes)
        all_times.append(times)
    return np.array(all_sizes), np.array(all_times)


def lognormal(level: float, seed: int, shape: Sequence[int]) -> npt.NDArray[np.float64]:
    """Factors of mean 1 and the given relative standard deviation."""
    sigma = np.sqrt(np.log1p(level**2))
    return np.exp(np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, size=tuple(shape)))


@pytest.fixture(name="run")
def run_fixture() -> Run:
    return run


@pytest.fixture(name="reports_of")
def reports_of_fixture() -> Callable[[Sequence[int], Sequence[float]], Reports]:
    return reports_of


@pytest.fixture(name="noise")
def noise_fixture() -> Callable[[float, int, Sequence[int]], npt.NDArray[np.float64]]:
    return lognormal

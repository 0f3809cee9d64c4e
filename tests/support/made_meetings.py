"""Iterations of workers whose times are made up, so that it is known how long equal sizes would have taken."""

from dataclasses import dataclass

import numpy as np

from evenstep.report.account.account import Meetings

BATCH, COMM = 240, 0.002
START = 2
"""Iterations with equal sizes, before any speed is known; the first only warms up."""


@dataclass
class Made:
    """`gained` is how many times as fast the run was as with equal sizes, whose iterations had the same slowness."""

    meetings: Meetings
    gained: float


def made(slowness, *, fixed=0.0, noise=0.0, seed=0, totals=None, compiling=0.0, lag=0, balanced=True):
    """A run whose sizes follow the times of the iterations before.

    `slowness` has the shape [iterations, workers]. An iteration takes 0.1 s for an equal share, of which the part
    `fixed` does not depend on the size. `totals` are the samples of each iteration. The first iteration at each size
    takes `compiling` seconds more. Times are reported `lag` iterations late.
    """
    iterations, workers = slowness.shape
    slowness = slowness * np.random.default_rng(seed).lognormal(0.0, noise, slowness.shape)
    totals = np.full(iterations, BATCH) if totals is None else np.array(totals)
    equal = np.array([shares(total, np.ones(workers)) for total in totals])
    sizes, paces, seen = np.empty((iterations, workers)), None, [set() for _ in range(workers)]
    compiled = np.zeros((iterations, workers))
    for number, slow in enumerate(slowness):
        sizes[number] = equal[number] if number < START or not balanced else shares(totals[number], 1 / paces)
        pace = slow * seconds_of(sizes[number], fixed, workers) / np.maximum(sizes[number], 1)
        paces = pace if paces is None or number < START else paces * (pace / paces) ** 0.3
        for worker, size in enumerate(sizes[number].tolist()):
            compiled[number, worker] = compiling * (size not in seen[worker])
            seen[worker].add(size)
    compute = slowness * seconds_of(sizes, fixed, workers) + compiled
    compiled[1:] = 0.0  # Equal sizes compile in the first iteration only.
    would = slowness * seconds_of(equal, fixed, workers) + compiled
    gained = (would.max(axis=1) + COMM).sum() / (compute.max(axis=1) + COMM).sum()
    return Made(meetings_of(sizes, compute, lag=lag), gained)


def seconds_of(sizes, fixed, workers):
    return 0.1 * (fixed + (1 - fixed) * sizes * workers / BATCH)


def shares(total, weights):
    """Whole sizes in about these proportions."""
    ends = np.rint(total * np.cumsum(weights) / np.sum(weights))
    return np.diff(ends, prepend=0.0)


def meetings_of(sizes, compute, *, lag=0, comm=COMM):
    """Iterations with these sizes and seconds, shape [iterations, workers], of workers that do nothing else."""
    sizes, compute = np.array(sizes, dtype=np.float64).T, np.array(compute).T
    wait = compute.max(axis=0) - compute
    measured, told = (np.roll(each, lag, axis=1) for each in (sizes, compute))
    measured[:, :lag] = told[:, :lag] = 0.0
    return Meetings(
        samples=sizes,
        measured=measured,
        own=np.stack([told, np.zeros_like(told), np.zeros_like(told)]),
        wait=wait,
        comm=np.full_like(wait, comm),
        seconds=compute.max(axis=0) + comm,
    )

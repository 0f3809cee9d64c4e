"""Ways to form groups of workers that synchronise inside: pure functions of speeds, hosts or the user's wishes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import FloatArray, IntArray

Groups = tuple[tuple[int, ...], ...]
"""The workers of each group in ascending order, by the group's number."""


def by_rank(workers: Sequence[int], count: int) -> Groups:
    """`count` groups of neighbours by rank, whose sizes differ by at most one; fewer if there are fewer workers.

    >>> by_rank(range(5), 2)
    ((0, 1, 2), (3, 4))
    """
    ranks = sorted(workers)
    count = min(count, len(ranks))
    bounds = [-(-number * len(ranks) // count) for number in range(count + 1)] if count else []
    return tuple(tuple(ranks[start:stop]) for start, stop in pairwise(bounds))


def by_host(hosts: Sequence[str]) -> Groups:
    """One group per host, inside which workers reach each other without the network; `hosts` by rank.

    >>> by_host(["a", "b", "a"])
    ((0, 2), (1,))
    """
    groups: dict[str, list[int]] = {}
    for worker, host in enumerate(hosts):
        groups.setdefault(host, []).append(worker)
    return tuple(map(tuple, groups.values()))


def each_by_speed(seconds: Sequence[float], most: int) -> list[Groups]:
    """1, 2, ... up to `most` groups of workers of similar speed, with the most iterations per second between them.

    A group waits for its slowest worker, so N workers do sum over groups of n_j / max(seconds of j). For given group
    sizes, neighbours in the order of speed do the most, so only the cuts are searched. A further group that would add
    nothing is not formed. Groups of faster workers come first.

    Basu et al., "Balancing Stragglers Against Staleness in Distributed Deep Learning", HiPC 2018, do not say how
    workers are assigned; groups of similar speed are Gao and Chen's (GSGD, 2020).

    Args:
        seconds: time of each worker's iteration, by rank; positive.
        most: 1 or more.

    >>> each_by_speed([1.0, 4.0, 1.0, 1.1], 2)
    [((0, 1, 2, 3),), ((0, 2, 3), (1,))]
    """
    order = sorted(range(len(seconds)), key=lambda worker: (seconds[worker], worker))
    return [
        tuple(tuple(sorted(order[start:stop])) for start, stop in pairwise(cuts))
        for cuts in _best_cuts(np.array([seconds[worker] for worker in order]), most)
    ]


def rate_of(groups: Groups, seconds: Sequence[float]) -> float:
    """The workers' iterations per second if each group waits for its slowest worker and for no other group.

    N over this is the time for a number of samples, relative to N workers of one second each: N / sum over groups of
    (n_j / s_j), where s_j is the slowdown of the slowest in j.

    >>> rate_of(((0, 1), (2, 3)), [1.0, 1.0, 1.0, 4.0])
    2.5
    """
    return sum(len(group) / max(seconds[worker] for worker in group) for group in groups)


def require_partition(groups: Groups, workers: int) -> None:
    """Check a user's groups; ConfigError if a worker is in no group or in two, or a group is empty."""
    named = sorted(worker for group in groups for worker in group)
    if named != list(range(workers)) or not all(groups):
        text = " | ".join(" ".join(map(str, group)) for group in groups)
        raise ConfigError(
            f"the groups {text!r} do not have each of the workers 0 to {workers - 1} once: name every rank in one group"
        )


def _best_cuts(seconds: FloatArray, most: int) -> list[list[int]]:
    """Cuts of ascending `seconds` into 1, 2, ... groups; each starts with 0 and ends with the number of workers."""
    workers = len(seconds)
    # rates[stop]: the best rate of the first `stop` workers; a group [start, stop) adds (stop - start) / its slowest.
    starts = np.arange(workers + 1)
    rates = np.full(workers + 1, -np.inf)
    rates[0] = 0.0
    chosen: list[IntArray] = []
    best: list[list[int]] = []
    done = 0.0
    for _ in range(min(most, workers)):
        added = np.full(workers + 1, -np.inf)
        cut = np.zeros(workers + 1, dtype=np.int64)
        for stop in range(1, workers + 1):
            candidates = rates[:stop] + (stop - starts[:stop]) / seconds[stop - 1]
            cut[stop] = int(np.argmax(candidates))
            added[stop] = candidates[cut[stop]]
        rates = added
        if rates[workers] <= done * (1 + 1e-9):  # Rounding must not make a group.
            break
        done = float(rates[workers])
        chosen.append(cut)
        cuts = [workers]
        for each in reversed(chosen):
            cuts.append(int(each[cuts[-1]]))
        best.append(cuts[::-1])
    return best

"""Cuts a worker's share of an iteration into the batches that are computed one after the other."""

from dataclasses import replace

import numpy as np

from evenstep.core.samples.balanced import balanced
from evenstep.core.samples.costs import EpochCosts
from evenstep.core.samples.share import Share
from evenstep.core.values import IntArray


def micro_batches(share: Share, size: int, costs: EpochCosts | None = None, *, fewest: int = 1) -> list[Share]:
    """The share in pieces of `size` positions, the last one shorter if they do not divide.

    A last piece of one position has it twice, because many models cannot compute on one sample. With `costs`, pieces
    cost at most as much as `size` average samples, but for a sample that costs more, and are as equal as that allows.
    Padded pieces have samples of similar length. With `fewest` 2, none has only one sample if there are two for each
    piece, and those of the costliest samples may cost more.

    >>> share = Share(iteration=0, positions=(3, 4, 5, 6, 7), samples=5, sizes=np.array([5, 7]))
    >>> [(piece.positions, piece.portion) for piece in micro_batches(share, 2)]
    [((3, 4), 0.4), ((5, 6), 0.4), ((7, 7), 0.2)]
    """
    whole, pieces, done = share.positions, list[Share](), 0
    if costs is None:
        cut = [whole[start : start + size] for start in range(0, len(whole), size)]
    else:
        cut = _cut_by_cost(share, size, costs, fewest)
    if len(cut) == 1:
        return [share]
    for positions in cut:
        alone = costs is None and len(positions) == 1 < size
        pieces.append(
            replace(
                share,
                positions=positions * 2 if alone else positions,
                samples=min(max(share.samples - done, 0), len(positions)),
                portion=len(positions) / len(whole),
                first=not done,
                last=done + len(positions) == len(whole),
                cost=None if costs is None else costs.samples(positions),
                padding=None if costs is None else costs.padding(positions),
            )
        )
        done += len(positions)
    return pieces


def _cut_by_cost(share: Share, size: int, costs: EpochCosts, fewest: int) -> list[tuple[int, ...]]:
    """The positions of each piece; those of a share that has copies stay together."""
    positions = np.array(share.positions)
    units, most = costs.of(positions), size * costs.costs.mean
    if share.samples < len(positions) or costs.costs.together(units) <= most:
        return [share.positions]
    cut = (_padded_pieces if costs.costs.padded else pieces)(units, most, fewest)
    return [tuple(positions[each].tolist()) for each in cut]


def pieces(units: IntArray, most: int, fewest: int) -> list[IntArray]:
    """The indices of each piece's samples, in as few pieces as `balanced` finds.

    Pieces have the fewest samples if there are enough, and cost `most` or what the costliest `fewest` samples need.
    """
    length = len(units)
    count = min(-(-int(units.sum()) // most), length)
    # The costliest sample may share its piece with another one.
    most = max(most, int(units.max()) + (fewest - 1) * int(units.min()))
    while True:
        few = np.full(count, min(fewest, length // count))
        owners = balanced(units, np.ones_like(few), lower=few, upper=np.full_like(few, length))
        if count == length or np.bincount(owners, weights=units).max() <= most:
            return [np.flatnonzero(owners == piece) for piece in range(count)]
        count += 1


def _padded_pieces(units: IntArray, most: int, fewest: int) -> list[IntArray]:
    """The same for padded samples: neighbours in the order of length, the longest first."""
    longest_first = np.argsort(-units, kind="stable")
    pieces, begin = [], 0
    while begin < len(units):
        left = len(units) - begin
        count = min(max(most // int(units[longest_first[begin]]), fewest), left)
        count = left if left - count < fewest else count
        pieces.append(np.sort(longest_first[begin : begin + count]))
        begin += count
    return pieces

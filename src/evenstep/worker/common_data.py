"""Checks that all workers have the same samples, of which each trains on a part."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evenstep.core.common_data import bytes_of, checksum, unlike
from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.worker.agreement import Exchange


def length_of(leaves: Sequence[Any]) -> int:
    """Return the number of samples of the data whose tree has these leaves; ConfigError if they are not such data."""
    for each in leaves:
        indexed = hasattr(each, "__getitem__") and hasattr(each, "__len__") and not isinstance(each, str | bytes)
        if not indexed or getattr(each, "shape", None) == ():
            raise ConfigError(
                f"data must be arrays with a row for each sample, which can be indexed, not {shown(each)}: read a"
                " stream into arrays, or give numpy.arange(length) and take the samples with the indices"
            )
    lengths = sorted({len(each) for each in leaves})
    if len(lengths) != 1:
        found = f"they have {', '.join(map(str, lengths))}" if lengths else "there are none"
        raise ConfigError(f"the arrays of data must have equally many rows, one for each sample, but {found}")
    return lengths[0]


def require_rows(arrays: Sequence[Any], indices: IntArray) -> None:
    """Check that each array that the data returned has a row for each index; ConfigError if not."""
    for each in arrays:
        if np.shape(each)[:1] != (len(indices),):
            raise ConfigError(
                f"the data returned an array of shape {list(np.shape(each))} for {len(indices)} indices: let its"
                " __getitem__ take an array of indices and return arrays with a row for each of them"
            )


def require_common(
    batch_of: Callable[[IntArray], Sequence[Any]], length: int, exchange: Exchange, *, rank: int, partition: str | None
) -> None:
    """Check that all workers have the same samples, by the first, the middle and the last of them.

    All workers must call it together. Errors as for `require_alike`.

    Args:
        batch_of: Returns the arrays of the batch with these indices, int64 of shape [rows].
        length: Samples in the data.
        exchange: Exchanges this worker's record for the records of all.
        rank: This worker.
        partition: "common": the data are the same, whatever the samples say. None: compare them.

    Raises:
        ConfigError: The partition has another value.
    """
    if partition not in (None, "common"):
        raise ConfigError(
            f"partition must be 'common' or None, not {shown(partition)}: data that stay with their workers train under"
            " PyTorch or Flower"
        )
    indices = np.unique(np.array([0, length // 2, length - 1], dtype=np.int64))

    def own() -> int:
        return checksum(bytes_of(np.asarray(array)) for array in batch_of(indices))

    records = exchange({"partition": partition, "samples": own() if partition is None else 0})
    if any(record["partition"] is not None for record in records):
        return
    require_alike(
        [record["samples"] for record in records],
        exchange,
        rank,
        again=own,
        advice="give all workers all of the data, which evenstep shares out, and no shards of your own; or"
        ' partition="common" if the data are the same',
    )


def require_alike(
    checksums: Sequence[int], exchange: Exchange, rank: int, *, again: Callable[[], int], advice: str
) -> None:
    """Check that all workers' samples have the same checksum; all workers must call it together.

    If they do not, each worker fetches its samples again. Samples that differ between fetches prove nothing.

    Args:
        checksums: The checksums of all workers' samples; 0 where they cannot be compared.
        exchange: Exchanges this worker's record for the records of all.
        rank: This worker.
        again: Fetches this worker's samples again, and returns their checksum.
        advice: Advice for the error message.

    Raises:
        DisagreementError: Workers have different samples; the message names two, alike on every worker.
    """
    odd = unlike(checksums)
    if odd is None:
        return
    same = all(again() == checksums[rank] for _ in range(3))
    if not all(each["same"] for each in exchange({"same": same})):
        return
    raise DisagreementError(
        f"worker {odd[0]} has other samples than worker {odd[1]}, in a dataset of the same length: {advice}"
    )

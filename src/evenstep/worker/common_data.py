"""Whether all workers have the same samples, of which each is to train on a part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.shown import shown
from evenstep.core.sketch import Sketch, leaf_of, unlike
from evenstep.core.values import IntArray

Exchange = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""Exchanges this worker's record for those of all."""

_REPEATS: Final = 3
_ADVICE: Final = (
    "give all workers all of the data, which evenstep shares out, and no shards of your own; or"
    ' partition="common" if the data are the same'
)


def require_common(
    batch_of: Callable[[IntArray], Sequence[Any]], length: int, exchange: Exchange, *, rank: int, partition: str | None
) -> None:
    """Check that all workers have the same samples, by the first, the middle and the last of them.

    All workers must call it together. Errors as for `require_alike`.

    Args:
        batch_of: Returns the arrays of the batch with these indices, int64 of shape [rows].
        length: Samples in the data.
        exchange: As named.
        rank: This worker.
        partition: "common": the data are the same, whatever the samples say. None: compare them.

    Raises:
        ConfigError: The partition is another.
    """
    if partition not in (None, "common"):
        raise ConfigError(
            f"partition must be 'common' or None, not {shown(partition)}: data that stay with their workers train under"
            " PyTorch or Flower"
        )
    indices = np.unique(np.array([0, length // 2, length - 1], dtype=np.int64))

    def sketch() -> Sketch:
        rows = (np.asarray(row) for array in batch_of(indices) for row in np.asarray(array))
        leaves = (leaf_of(row, row.shape) for row in rows)
        return tuple(leaf for leaf in leaves if leaf is not None)

    records = exchange({"partition": partition, "sketch": msgspec.to_builtins(sketch() if partition is None else ())})
    if any(record["partition"] is not None for record in records):
        return
    sketches = [msgspec.convert(record["sketch"], Sketch) for record in records]
    require_alike(sketches, exchange, rank, again=sketch, advice=_ADVICE)


def require_alike(
    sketches: Sequence[Sketch], exchange: Exchange, rank: int, *, again: Callable[[], Sketch], advice: str
) -> None:
    """Check that these sketches are of the same samples; all workers must call it together.

    If they are not, each worker sketches its samples again. Samples that differ from one fetch to the next say nothing.

    Args:
        sketches: Of all workers.
        exchange: As named.
        rank: This worker.
        again: Sketches this worker's samples.
        advice: What to do, for the error.

    Raises:
        DisagreementError: Workers have different samples; the message names two, alike on every worker.
    """
    odd = unlike(sketches)
    if odd is None:
        return
    own = repr(msgspec.to_builtins(sketches[rank]))
    same = all(repr(msgspec.to_builtins(again())) == own for _ in range(_REPEATS))
    if not all(each["same"] for each in exchange({"same": same})):
        return
    first = next(rank for rank, sketch in enumerate(sketches) if sketch)
    raise DisagreementError(
        f"worker {odd} has other samples than worker {first}, in a dataset of the same length: {advice}"
    )

"""Tables [spots.NAME] of a cluster file."""

from evenstep.cluster.quantity import DURATION
from evenstep.cluster.spot import DrawnSpot, RecordedSpot, Spot, Stay
from evenstep.cluster.table import Table, as_quantity
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown


def read_spot(table: Table, *, seed: int) -> Spot:
    """The presence that a table describes; ConfigError where it describes none, or two."""
    table.only(("stays", "away", "recorded"))
    if "recorded" in table.entries:
        if len(table.entries) > 1:
            raise ConfigError("the key 'recorded' does not go with 'stays' and 'away': remove it or them")
        return RecordedSpot(recorded=tuple(_read_stay(item) for item in table.items("recorded")))
    return DrawnSpot(
        stays_seconds=table.quantity("stays", DURATION),
        away_seconds=table.quantity("away", DURATION) if "away" in table.entries else None,
        seed=seed,
    )


def _read_stay(item: object) -> Stay:
    if not isinstance(item, list) or len(item) != 2:
        raise ConfigError(f'each of recorded must be a pair such as ["0 s", "90 s"], not {shown(item)}')
    begins, ends = (as_quantity("each time of recorded", time, DURATION) for time in item)
    return Stay(begins=begins, ends=ends)

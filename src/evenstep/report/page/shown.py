"""Which workers are drawn where there are too many for one plot; tables have all."""

from typing import Final

from evenstep.report.lanes import Part
from evenstep.report.overview import RunOverview

MAX_WORKERS: Final = 32


def shown_workers(overview: RunOverview, most: int = MAX_WORKERS) -> list[int]:
    """All workers, or of very many those who waited most and least."""
    by_waiting = sorted(overview.workers, key=lambda each: each.parts[Part.WAIT.value])
    if len(by_waiting) > most:
        half = most // 2
        by_waiting = by_waiting[:half] + by_waiting[-half:]
    return sorted(each.worker for each in by_waiting)

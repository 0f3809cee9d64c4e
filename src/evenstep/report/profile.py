"""A profile as a table for a terminal."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from evenstep.cluster.profile import ProfiledMemory, ProfilePoint

_BAR: Final = 30


def profile_table(points: Sequence[ProfilePoint], *, knee: int, memory: ProfiledMemory | None) -> Table:
    """One row for each size, its throughput as a bar; the knee and the memory limit below."""
    best = max(point.samples_per_second for point in points)
    limit = "memory does not grow with the batch, as far as was seen"
    if memory is not None:
        limit = (
            f"memory: {memory.bytes_per_sample / 1e6:,.2f} MB a sample and {memory.fixed_bytes / 1e6:,.0f} MB beside;"
            f" about {memory.largest_batch:,} samples fit in the {memory.capacity_bytes / 1e9:,.1f} GB there are"
        )
    caption = f"knee: from {knee} samples on, at least 90 % of the best throughput\n{limit}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("batch", "time", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point.samples}" + (" <" if point.samples == knee else "  "),
            f"{point.seconds * 1e3:,.2f} ms",
            f"{point.samples_per_second:,.0f}",
            "█" * round(_BAR * point.samples_per_second / best),
            f"{point.peak_bytes / 1e6:,.0f} MB",
        )
    return table

"""A profile as a table for a terminal, and as a picture."""

from collections.abc import Sequence
from html import escape
from math import log2
from typing import Final

from rich import box
from rich.table import Table

from evenstep.cluster.profile import ProfiledMemory, ProfilePoint

_BAR: Final = 30
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _FOOT = 720, 360, 64, 64, 72, 56
_STYLE: Final = """
    svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
      --card: #ffffff; --ink: #1f2328; --soft: #59636e; --grid: #d8dee4; --rate: #0969da; --time: #bc4c00; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #0d1117; --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --rate: #4493f8; --time: #f0883e; } }
    .card { fill: var(--card); } text { fill: var(--soft); font-size: 12px; }
    .title { fill: var(--ink); font-size: 16px; font-weight: 600; }
    .axis { stroke: var(--grid); } .knee { stroke: var(--soft); stroke-dasharray: 4 4; }
    .rate { stroke: var(--rate); fill: none; stroke-width: 2.5; } text.rate { fill: var(--rate); stroke: none; }
    .time { stroke: var(--time); fill: none; stroke-width: 2.5; } text.time { fill: var(--time); stroke: none; }
"""


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


def profile_svg(points: Sequence[ProfilePoint], *, knee: int, title: str) -> str:
    """Throughput and time against the batch size, on a logarithmic axis, with the knee marked."""
    first, last = log2(points[0].samples), log2(points[-1].samples)
    rates = [point.samples_per_second for point in points]
    times = [point.seconds * 1e3 for point in points]
    floor = _HEIGHT - _FOOT

    def across(samples: int) -> float:
        return _LEFT + (log2(samples) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def line(kind: str, values: Sequence[float]) -> str:
        heights = (floor - value / max(values) * (floor - _TOP) for value in values)
        path = " ".join(f"{across(p.samples):.1f},{y:.1f}" for p, y in zip(points, heights, strict=True))
        return f'  <polyline class="{kind}" points="{path}"/>'

    ticks = [
        f'  <text x="{across(point.samples):.1f}" y="{floor + 18}" text-anchor="middle">{point.samples}</text>'
        for point in points
        if point.samples & (point.samples - 1) == 0
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
            f' aria-label="{escape(title)}">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{_STYLE}  </style>",
            f'  <rect class="card" width="{_WIDTH}" height="{_HEIGHT}" rx="10"/>',
            f'  <text class="title" x="24" y="34">{escape(title)}</text>',
            f'  <line class="axis" x1="{_LEFT}" y1="{floor}" x2="{_WIDTH - _RIGHT}" y2="{floor}"/>',
            f'  <line class="knee" x1="{across(knee):.1f}" y1="{_TOP}" x2="{across(knee):.1f}" y2="{floor}"/>',
            f'  <text x="{across(knee) + 6:.1f}" y="{floor - 8}">knee: {knee}</text>',
            line("rate", rates),
            line("time", times),
            f'  <text class="rate" x="24" y="58">samples/s, up to {max(rates):,.0f}</text>',
            f'  <text class="time" x="{_WIDTH - 24}" y="58" text-anchor="end">time, up to {max(times):,.1f} ms</text>',
            *ticks,
            f'  <text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">samples in a batch</text>',
            "</svg>",
            "",
        ]
    )

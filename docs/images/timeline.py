"""Draws the picture of the README: the same iterations under bsp and under lb-bsp, on one axis of time.

evenstep demo --run-dir runs
python docs/images/timeline.py runs/bsp runs/lb-bsp > docs/images/bsp-vs-lb-bsp.svg
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final
from xml.sax.saxutils import escape

from window import Window, same_window

from evenstep.report.overview import overview_of
from evenstep.report.recorded import RecordedRun, read_run

_WIDTH: Final = 960
_LEFT, _RIGHT = 172, 36
_LANE, _LANE_GAP = 26, 7
_TOP, _PANEL_HEAD, _PANEL_GAP, _FOOT = 96, 34, 30, 46
_SLOW_FROM = 1.5
"""A worker that needs this many times the others' seconds per sample is named as the slow one."""

_STYLE: Final = """
    svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
          --card: #ffffff; --edge: #d8dee4; --ink: #1f2328; --soft: #59636e; --grid: #eaeef2;
          --fast: #2b6cb0; --slow: #d9730d; --on: #ffffff; --wait: #f1f3f5; --hatch: #c3cad2; --rest: #8c959f;
          --good: #1a7f37; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #0d1117; --edge: #30363d; --ink: #e6edf3; --soft: #9198a1; --grid: #21262d;
            --fast: #4b96e6; --slow: #f0883e; --on: #0d1117; --wait: #161b22; --hatch: #3d444d; --rest: #6e7681;
            --good: #3fb950; }
    }
    .card { fill: var(--card); stroke: var(--edge); }
    .title { font-size: 21px; font-weight: 650; fill: var(--ink); }
    .text { font-size: 13px; fill: var(--soft); }
    .name { font-size: 15px; font-weight: 650; fill: var(--ink); }
    .label { font-size: 13px; fill: var(--ink); }
    .small { font-size: 12px; fill: var(--soft); }
    .size { font-size: 11.5px; font-weight: 600; fill: var(--on); }
    .good { font-size: 15px; font-weight: 650; fill: var(--good); }
    .goodline { stroke: var(--good); stroke-width: 1.5; fill: none; }
    .end { stroke: var(--soft); stroke-dasharray: 4 4; }
    .grid { stroke: var(--grid); }
    .axis { stroke: var(--soft); }
    .cut { stroke: var(--card); stroke-width: 1.5; }
    .fast { fill: var(--fast); } .slow { fill: var(--slow); } .rest { fill: var(--rest); }
    .wait { fill: url(#hatch); }
    .back { fill: var(--wait); } .line { stroke: var(--hatch); stroke-width: 1.6; }
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A run, the part of it that is shown, and what is said beside its scheme's name.

    `steps` is the number of local steps in so many samples of an iteration.
    """

    run: RecordedRun
    window: Window
    caption: str
    steps: Callable[[int], int] = lambda _: 1


def timeline_svg(panels: Sequence[Panel], *, title: str, subtitle: str) -> str:
    """One lane per worker, with what it computed and how long it waited; all panels have the same axis of time.

    Give the slowest scheme first. The empty end of a later panel is the time that its scheme saves.
    """
    return _Drawing(panels).svg(title, subtitle)


@final
class _Drawing:
    """Collects the elements from top to bottom."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        self._panels = panels
        self._longest = max(panel.window.seconds for panel in panels)
        self._scale = (_WIDTH - _LEFT - _RIGHT) / (self._longest * 1.01)
        self._parts: list[str] = []
        self._y = float(_TOP)

    def svg(self, title: str, subtitle: str) -> str:
        """The whole picture."""
        self._text(24, 36, title, "title")
        self._text(24, 58, subtitle, "text")
        self._legend(24, 80)
        bottom = (
            _TOP
            + sum(self._panel_height(panel.window) for panel in self._panels)
            + _PANEL_GAP * (len(self._panels) - 1)
        )
        self._grid(bottom)
        # Where a run does not tell, its workers are taken to be as slow as in another.
        overviews = [overview_of("", panel.run) for panel in self._panels]
        slow = [{each.worker: each.slowdown for each in run.summary.workers if each.slowdown} for run in overviews]
        known = next(filter(None, slow), {})
        for panel, own in zip(self._panels, slow, strict=True):
            self._panel(panel, own or known)
            self._y += _PANEL_GAP
        height = bottom + _FOOT
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
                f' aria-label="{escape(title)}">',
                f"  <title>{escape(title)}</title>",
                f"  <style>{_STYLE}  </style>",
                '  <defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse"'
                ' patternTransform="rotate(45)"><rect class="back" width="7" height="7"/>'
                '<line class="line" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>',
                f'  <rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _panel_height(self, window: Window) -> int:
        return _PANEL_HEAD + len(window.lanes) * (_LANE + _LANE_GAP) - _LANE_GAP

    def _x(self, seconds: float) -> float:
        return _LEFT + seconds * self._scale

    def _panel(self, panel: Panel, slow: Mapping[int, float]) -> None:
        self._text(24, self._y + 18, panel.run.scheme, "name")
        self._text(max(_LEFT, 48 + 9 * len(panel.run.scheme)), self._y + 18, panel.caption, "text")
        top = self._y + _PANEL_HEAD
        for lane, (worker, spans) in enumerate(panel.window.lanes.items()):
            y = top + lane * (_LANE + _LANE_GAP)
            self._text(24, y + 17, f"worker {worker}", "label")
            slowdown = slow.get(worker, 1.0)
            if slowdown >= _SLOW_FROM:
                factor = f"{slowdown:.1f}x slower".replace(".0x", "x")
                self._text(_LEFT - 12, y + 17, factor, "small", anchor="end")
            for span in spans:
                kind = "slow" if span.slow else "fast"
                steps = panel.steps(span.samples)
                size = f"{steps} x {span.samples // steps}" if steps > 1 else str(span.samples)
                self._box(span.compute_began, span.compute_ended, y, kind, size)
                each = (span.compute_ended - span.compute_began) / steps
                for cut in (span.compute_began + each * step for step in range(1, steps)):
                    if 0 < cut < self._longest:
                        self._line("cut", self._x(cut), self._x(cut), y, y + 5)
                        self._line("cut", self._x(cut), self._x(cut), y + _LANE - 5, y + _LANE)
                self._box(span.compute_ended, span.wait_ended, y, "wait")
                self._box(span.wait_ended, span.ended, y + _LANE / 2 - 2, "rest", height=4)
        self._y = top + len(panel.window.lanes) * (_LANE + _LANE_GAP) - _LANE_GAP
        self._saving(panel.window, (top + self._y) / 2)

    def _saving(self, window: Window, y: float) -> None:
        """What lies between the end of this scheme and the end of the slowest."""
        saved = self._longest - window.seconds
        begin, end = self._x(window.seconds) + 6, self._x(self._longest)
        if end - begin < 190:
            return
        arrow = f"M{begin:.1f} {y:.1f}H{end - 6:.1f}m-6 -4l6 4l-6 4"
        self._parts.append(f'  <path class="goodline" d="{arrow}"/>')
        middle = (begin + end) / 2
        self._text(middle, y - 10, f"{self._longest / window.seconds:.1f}x as fast", "good", anchor="middle")
        self._text(middle, y + 20, f"{saved * 1000:.0f} ms saved", "text", anchor="middle")

    def _grid(self, bottom: float) -> None:
        step = _nice_step(self._longest * 1000)
        for tick in range(0, int(self._longest * 1000 * 1.01) + 1, step):
            x = self._x(tick / 1000)
            self._line("grid", x, x, _TOP + 26, bottom + 6)
            self._text(x, bottom + 22, f"{tick}", "small", anchor="middle")
        self._line("axis", _LEFT, _WIDTH - _RIGHT, bottom + 6, bottom + 6)
        x = self._x(self._longest)
        self._line("end", x, x, _TOP + 26, bottom + 6)
        self._text(24, bottom + 22, "milliseconds", "small")

    def _line(self, kind: str, x1: float, x2: float, y1: float, y2: float) -> None:
        self._parts.append(f'  <line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')

    def _legend(self, x: float, y: float) -> None:
        entries = (
            ("fast", "compute (its batch size inside)", 12),
            ("slow", "compute of the slow worker", 12),
            ("wait", "waiting for the others", 12),
            ("rest", "communication and the script", 4),
        )
        for kind, meaning, height in entries:
            top = y - 5 - height / 2
            self._parts.append(f'  <rect class="{kind}" x="{x}" y="{top}" width="18" height="{height}" rx="2"/>')
            self._text(x + 25, y, meaning, "small")
            x += 25 + 6.6 * len(meaning) + 20

    def _box(self, begin: float, end: float, y: float, kind: str, text: str = "", height: int = _LANE) -> None:
        begin, end = max(begin, 0.0), min(end, self._longest)
        x, width = self._x(begin), (end - begin) * self._scale
        if width <= 0.2:
            return
        gap = min(1.0, width / 4)
        self._parts.append(
            f'  <rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width - gap:.1f}" height="{height}" rx="2"/>'
        )
        if text and width > 7 * len(text) + 4:
            self._text(x + (width - gap) / 2, y + height / 2 + 4, text, "size", anchor="middle")

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
        self._parts.append(
            f'  <text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )


def _nice_step(milliseconds: float) -> int:
    """The distance of the axis' ticks: 1, 2 or 5 times a power of ten, at most ten of them."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if milliseconds / (factor * power) <= 10:
                return factor * power
        power *= 10


CAPTIONS: Final = {
    "bsp": "equal batches: everyone waits for the slowest",
    "lb-bsp": "each worker gets what it can do in the same time",
}

if __name__ == "__main__":
    runs = [read_run(Path(argument)) for argument in sys.argv[1:]]
    windows = same_window(runs, 6)
    if windows is None:
        sys.exit("the runs have no 6 full iterations in a row in common: let them run for longer")
    print(
        timeline_svg(
            [
                Panel(run=run, window=window, caption=CAPTIONS.get(run.scheme, ""))
                for run, window in zip(runs, windows, strict=True)
            ],
            title="The same six iterations, with and without waiting for the slowest worker",
            subtitle="Four workers, one of them four times slower (emulated); same seed, same samples, same"
            " mathematics. Measured by evenstep demo.",
        )
    )

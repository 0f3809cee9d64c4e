"""The plots of a report as PNG files, for papers and slides."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evenstep.core.errors import ConfigError
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import Plot
from evenstep.report.page.html import all_plots

_WIDTH: Final = 900
_SCALE: Final = 2.5
"""Pixels per point: a plot across a page is then printed with 300 of them per inch."""


def require_png(folder: Path) -> None:
    """Refuse what could not be written.

    Raises:
        ConfigError: kaleido is missing, or the folder cannot be made.
    """
    if importlib.util.find_spec("kaleido") is None or importlib.util.find_spec("plotly") is None:
        raise ConfigError("pictures need kaleido, and a Chrome or Chromium: pip install 'evenstep[png]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): give another folder") from error


def write_pngs(overviews: Sequence[RunOverview], folder: Path) -> list[Path]:
    """Write every plot of the page into the folder, and return the files.

    Raises:
        ConfigError: There is no browser that would draw them.
    """
    import kaleido

    plots = all_plots(overviews)
    files = [folder / f"{name}.png" for name in file_names([plot.key for plot in plots])]
    figures = [
        {"fig": _figure(plot), "path": str(file), "opts": {"format": "png", "width": _WIDTH, "scale": _SCALE}}
        for plot, file in zip(plots, files, strict=True)
    ]
    try:
        kaleido.write_fig_from_object_sync(figures)
    except Exception as error:
        if "chrome" in f"{type(error).__name__} {error}".lower():
            raise ConfigError("pictures are drawn by Chrome or Chromium, and none was found: install one") from error
        raise
    return files


def file_names(keys: Sequence[str]) -> list[str]:
    """A name for each that any system takes, and no name twice."""
    names: list[str] = []
    for key in keys:
        name = re.sub("[^A-Za-z0-9.=-]+", "-", key)
        again = sum(re.fullmatch(rf"{re.escape(name)}(\.[0-9]+)?", other) is not None for other in names)
        names.append(f"{name}.{again + 1}" if again else name)
    return names


def _figure(plot: Plot) -> dict[str, Any]:
    layout: Mapping[str, Any] = plot.layout
    title = {"text": plot.title, "x": 0.02, "font": {"size": 17}}
    margin = {**layout["margin"], "t": 80}
    ground = {"paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff"}
    return {"data": list(plot.traces), "layout": {**layout, **ground, "title": title, "margin": margin}}

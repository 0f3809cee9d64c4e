"""Draws the pictures of the schemes' pages: the same seconds of four workers under bsp and a scheme, in virtual time.

python docs/images/schemes.py
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Final

from timeline import Panel, timeline_svg
from window import Window, between

from evenstep.cli.main import main
from evenstep.report.recorded import read_run

_ITERATIONS, _BATCH = 60, 128
_FROM, _SECONDS = 1.080, 2.5
_CLUSTER: Final = """
[devices.one]
per_sample = "3 ms"
[disturbances.slow]
kind = "from"
factor = 3
first = {}
until = {}
[[workers]]
device = "one"
count = 3
[[workers]]
device = "one"
disturb = ["slow"]
"""
_BRIEFLY, _FOR_A_WHILE, _LASTING = (12, 15), (12, 16), (0, 1000)
"""The worker's iterations in which it is slow."""
_SLOW: Final = {
    _BRIEFLY: "three times slower for three iterations",
    _FOR_A_WHILE: "three times slower for four iterations",
    _LASTING: "three times slower",
}
PICTURES: Final = {
    "bsp": (("bsp",), _FOR_A_WHILE, "All wait for the slowest"),
    "lb-bsp": (("bsp", "lb-bsp"), _FOR_A_WHILE, "Sizes follow speeds, one iteration later"),
    "dbs": (("bsp", "dbs"), _LASTING, "Sizes follow speeds at the next epoch"),
    "local-sgd": (
        ("local-sgd:period=4", "local-sgd:period=4,load=lb-bsp"),
        _LASTING,
        "Models meet after four iterations",
    ),
    "diloco": (
        ("diloco:period=4", "diloco:period=4,steps=speed"),
        _LASTING,
        "Fast workers make more local steps until models meet",
    ),
    "asp": (("bsp", "asp"), _FOR_A_WHILE, "Nobody waits"),
    "ssp": (("bsp", "ssp:bound=2"), _FOR_A_WHILE, "Fast workers run at most two iterations ahead"),
    "dssp": (("ssp:bound=1", "dssp:lower=1,upper=6"), _BRIEFLY, "Fast workers may run on if they then wait less"),
    "grouped": (("bsp", "grouped:groups=2"), _FOR_A_WHILE, "Only the slow worker's group waits for it"),
    "periods": (("asp", "asp:period=4,steps=speed"), _LASTING, "Nobody waits, and local steps need fewer messages"),
}


def drawn(name: str) -> str:
    """The picture of a scheme's page, as SVG."""
    schemes, slow, title = PICTURES[name]
    panels = []
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "cluster.toml")
        cluster.write_text(_CLUSTER.format(*slow))
        epoch = 8 if name == "dbs" else _ITERATIONS
        words = ["--iterations", _ITERATIONS, "--global-batch-size", _BATCH, "--samples-per-epoch", epoch * _BATCH]
        for scheme in schemes:
            runs = Path(folder, scheme)
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                main(
                    [
                        "simulate",
                        *map(str, [cluster, *words, "--exchange", "12 ms", "--run-dir", runs, "--schemes", scheme]),
                    ]
                )
            (run,) = map(read_run, runs.iterdir())
            window = between(run, _FROM, _SECONDS)
            panels.append(Panel(run=run, window=window, caption=_caption(window), steps=_steps(scheme)))
    return timeline_svg(
        panels,
        title=f"{name}: {title[0].lower()}{title[1:]}",
        subtitle=f"Four workers, of which worker 3 is {_SLOW[slow]}; global batch {_BATCH}. Simulated.",
    )


def _steps(scheme: str) -> Callable[[int], int]:
    """The local steps that make up so many samples of a worker's period."""
    if "steps=speed" in scheme:  # Whole batches of the loader's.
        return lambda samples: samples * 4 // _BATCH
    period = re.search(r"period=(\d+)", scheme)
    return lambda _: int(period[1]) if period else 1


def _caption(window: Window) -> str:
    spans = [span for lane in window.lanes.values() for span in lane if span.ended <= window.seconds]
    waits = sum(
        min(span.wait_ended, window.seconds) - max(span.compute_ended, 0.0)
        for lane in window.lanes.values()
        for span in lane
        if span.wait_ended > 0 and span.compute_ended < window.seconds
    )
    share = waits / window.seconds / len(window.lanes)
    return f"{sum(span.samples for span in spans):,} samples; {share:.0%} of the workers' time is waiting"


if __name__ == "__main__":
    for name in PICTURES:
        Path(__file__).with_name(f"{name}.svg").write_text(drawn(name))

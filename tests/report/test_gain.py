"""The gain that is claimed of a real run, whose iterations have a real fixed part, beside a run with equal sizes.

The runs were recorded by fixed_costs/record.py; benchmarks/claimed_gain.py makes such runs anew.
"""

import gzip
import json
from pathlib import Path

import pytest

from evenstep.report.overview import overview_of
from evenstep.report.recorded import read_run

pytestmark = pytest.mark.xdist_group("gain")

RECORDED = Path(__file__).parent / "fixed_costs"
NOISE = 1.4
"""How far measurements of a few iterations were off on the machine that the runs were recorded on."""


@pytest.fixture(scope="module")
def overviews(tmp_path_factory):
    """What each run says of itself, by its scheme."""
    folder = tmp_path_factory.mktemp("runs")
    for log in RECORDED.glob("*/*.jsonl.gz"):
        run = folder / log.parent.name
        run.mkdir(exist_ok=True)
        (run / log.stem).write_bytes(gzip.decompress(log.read_bytes()))
    return {scheme: overview_of(scheme, read_run(folder / scheme)) for scheme in ("lb-bsp", "bsp")}


def test_the_fixed_part_is_large_enough_to_mislead(overviews):
    done = overviews["lb-bsp"].run.iterations[1]
    few = done.samples < 16
    per_sample = done.compute_seconds / done.samples
    assert per_sample[few].mean() > 1.4 * per_sample[~few].mean()


def test_the_claimed_gain_is_what_equal_sizes_really_took_longer(overviews):
    claimed, seconds = overviews["lb-bsp"].summary.over_equal_sizes, json.loads((RECORDED / "seconds.json").read_text())
    measured = seconds["bsp"] / seconds["lb-bsp"]
    assert claimed.low <= measured <= claimed.high
    assert claimed.estimate == pytest.approx(measured, rel=0.1)
    # Two workers, one of them three times slower, cannot gain more than (1 + 3) / 2.
    assert claimed.low <= 2.0


@pytest.mark.parametrize("scheme", ["lb-bsp", "bsp"])
def test_a_worker_is_as_slow_as_it_was_made(overviews, scheme):
    verdict = overviews[scheme].summary.verdict
    assert verdict.worker == 1
    assert 3 / NOISE <= verdict.slowdown <= 3 * NOISE


def test_a_run_with_equal_sizes_gains_nothing_over_them(overviews):
    assert str(overviews["bsp"].summary.over_equal_sizes) == "1.00"

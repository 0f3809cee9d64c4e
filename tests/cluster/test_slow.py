"""The launcher's `--slow`."""

import pytest

from evenstep.cluster import parse_slow
from evenstep.cluster.slowness import Constant
from evenstep.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "slowness"),
    [
        ("3=4x", Constant(worker=3, factor=4.0)),
        ("0=1.5x", Constant(worker=0, factor=1.5)),
        ("12=+50ms", Constant(worker=12, factor=1.0, extra_seconds=0.05)),
        ("3=4x+50ms", Constant(worker=3, factor=4.0, extra_seconds=0.05)),
        ("3=4x+0.5 s", Constant(worker=3, factor=4.0, extra_seconds=0.5)),
        ("3=+250us", Constant(worker=3, factor=1.0, extra_seconds=0.00025)),
    ],
)
def test_slowness_is_read(text: str, slowness: Constant) -> None:
    assert parse_slow(text) == slowness


@pytest.mark.parametrize("text", ["", "3", "3=", "=4x", "3=4", "3=x", "a=4x", "-1=4x", "3=-4x", "3=4x50ms", "3=50ms"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_slow(text)
    assert str(raised.value).startswith("--slow needs a rank and how much slower, such as 3=4x, ")
    assert str(raised.value).endswith(f"not {text!r}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3=0.5x", "--slow 3=0.5x: factor must be a finite number of at least 1, not 0.5"),
        ("3=4x+50", "--slow 3=4x+50: the extra time must be a duration such as \"10 ms\" (units: s, ms, us), not '50'"),
        ("3=+5min", "(units: s, ms, us), not '5min'"),
    ],
)
def test_a_wrong_number_or_unit_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_slow(text)
    assert message in str(raised.value)

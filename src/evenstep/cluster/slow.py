"""The launcher's `--slow`: one worker made slower, in one word."""

import re
from typing import Final

from evenstep.cluster.quantity import DURATION
from evenstep.cluster.slowness.constant import Constant
from evenstep.cluster.table import as_quantity, placed
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_SLOW: Final = re.compile(r"(?P<worker>[0-9]+)=(?:(?P<factor>[0-9]+(?:\.[0-9]+)?)x)?(?:\+(?P<extra>.+))?")


def parse_slow(text: str) -> Constant:
    """The slowness that RANK=FACTORx, RANK=+EXTRA or RANK=FACTORx+EXTRA asks for.

    Raises:
        ConfigError: The text has none of these forms, its unit is unknown or its factor is below 1.

    >>> parse_slow("3=4x")
    Constant(worker=3, factor=4.0, extra_seconds=0.0)
    >>> parse_slow("3=4x+50ms")
    Constant(worker=3, factor=4.0, extra_seconds=0.05)
    """
    match = _SLOW.fullmatch(text)
    if match is None or not (match["factor"] or match["extra"]):
        raise ConfigError(
            f"--slow needs a rank and how much slower, such as 3=4x, 3=+50ms or 3=4x+50ms, not {shown(text)}"
        )
    with placed(f"--slow {text}"):
        extra_seconds = as_quantity("the extra time", match["extra"], DURATION) if match["extra"] else 0.0
        return Constant(worker=int(match["worker"]), factor=float(match["factor"] or 1), extra_seconds=extra_seconds)

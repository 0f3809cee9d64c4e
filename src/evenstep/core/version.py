"""The version of evenstep, which all workers of a run must share."""

from typing import Final

VERSION: Final = "0.2.0"

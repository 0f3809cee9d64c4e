"""What holds workers up."""

from enum import StrEnum
from typing import final


@final
class Cause(StrEnum):
    """Why a worker is late, or all are."""

    COMPUTE = "compute"
    INPUT = "input"
    SCRIPT = "script"
    COMMUNICATION = "communication"

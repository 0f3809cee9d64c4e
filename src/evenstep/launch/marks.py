"""Files that a worker leaves for the launcher, in the folder that the launcher gives it."""

import json
import os
from contextlib import suppress
from pathlib import Path

from evenstep.launch.launch_settings import SUMMARY_FILE, LaunchSettings


def leave_mark(launched: LaunchSettings, name: int | str, state: str = "") -> None:
    """Tell the launcher that the script of the worker of this name uses evenstep.

    A replica that comes and goes tells under `RANK.state` whether it is `waiting` for the others or `computing` a step.
    """
    if launched.marks is not None:
        with suppress(OSError):  # If the launcher is gone, so is its folder.
            Path(launched.marks, str(name)).write_text(state, encoding="utf-8")


def leave_line(marks: str, line: str) -> None:
    """Leave a line of the summary to the launcher, which knows whether the run failed."""
    with suppress(OSError), Path(marks, SUMMARY_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def leave_error(error: BaseException) -> None:
    """Tell the keeper why this process ends, in torchrun's error file, so that the launcher repeats it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": f"{type(error).__name__}: {error}"}), encoding="utf-8")

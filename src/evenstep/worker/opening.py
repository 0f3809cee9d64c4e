"""The tracker of a worker, and its record of the run, which follow from an agreement under every framework."""

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from evenstep.core.errors import naming
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.narx import Narx
from evenstep.core.values import Factors
from evenstep.launch.launch_settings import VARIABLE, VARIABLES, LaunchSettings
from evenstep.launch.marks import leave_line
from evenstep.telemetry import SCHEMA, JsonlRecorder, Recorder, Silent
from evenstep.telemetry.events import Ended, Run
from evenstep.telemetry.say import say
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import Agreed
from evenstep.worker.device_memory import LearntLimit
from evenstep.worker.device_state import WithDevice
from evenstep.worker.factors import FactorSampler
from evenstep.worker.meter import Meter, Stopwatch
from evenstep.worker.summary import Summary
from evenstep.worker.tracker import Tracker
from evenstep.worker.worker import Worker

_SECRET: Final = re.compile(r"--?[\w-]*(key|token|secret|password)(=|$)", re.IGNORECASE)
"""An option whose value nobody should read in a report, alone or with the value."""


def open_tracker(
    agreed: Agreed,
    worker: Worker,
    stopwatch: Stopwatch,
    activity: Activity,
    *,
    launched: LaunchSettings,
    folder: Path | None = None,
    threads: int = 1,
    memory: LearntLimit | None = None,
    lags: Sequence[int] | None = None,
    recorder: Recorder | None = None,
    leads: bool = True,
) -> Tracker:
    """Make the tracker of this worker's iterations, with all that it keeps of the run.

    Events go to the `folder`. `threads` compute; `memory` learns this worker's largest batch, if it can be learned;
    `lags` as in `Tracker`. If workers come and go, this one has a `recorder`. Of a worker's processes, the one that
    `leads` keeps the records, and is slowed if slowness is emulated.
    """
    scheme, records, hold, clock, rank = agreed.scheme, agreed.workers, agreed.own.hold, time.perf_counter, worker.rank
    forecasts, sums_up = scheme.load.uses_forecasts, recorder is None and leads and not rank
    folder = folder if leads else None
    kept = record_in(folder, rank, launched) if recorder is None else Silent()
    # The first worker on each host records everybody's sizes: hosts may have separate directories. On servers all do:
    # sizes reach each at a different time, and a worker may leave.
    first_on_host = all(each["host"] != records[rank]["host"] for each in records[:rank])
    return Tracker(
        workers=worker,
        policy=scheme.policy(len(records)),
        problem=agreed.problem,
        limits=SizeLimits(scheme.load, agreed.problem, agreed.limits),
        meter=Meter(
            stopwatch=stopwatch,
            forecaster=Narx() if forecasts else None,
            # The load of this machine's processors does not describe an emulated device.
            factors=(hold or FactorSampler(threads=threads, clock=clock)).sample if forecasts else Factors,
            memory=memory,
        ),
        recorder=recorder or (kept if folder is None else WithDevice.of(kept, records[rank]["device"], clock)),
        follows_speed=scheme.load.follows_speed,
        lags=lags,
        tells_plans=first_on_host or scheme.served is not None,
        clock=clock,
        hold=hold if hold is None or leads else hold.of_peer(),
        activity=activity,
        summary=_summary(agreed, launched) if sums_up else None,
    )


def record_in(folder: Path | None, worker: int, launched: LaunchSettings) -> JsonlRecorder | Silent:
    """Open the record of this worker in the folder, if there is one; errors say who named the folder."""
    if folder is None:
        return Silent()
    with naming(VARIABLES["run_dir"] if str(folder) == launched.run_dir else "run_dir"):
        return JsonlRecorder(folder, worker, last=lambda: Ended(worker=worker, at=time.perf_counter()))


def _summary(agreed: Agreed, launched: LaunchSettings) -> Summary | None:
    alone, marks = len(agreed.workers) == 1 and VARIABLE not in os.environ, launched.marks
    # With servers, the first server gives it.
    if alone or launched.survey_up_to or agreed.scheme.served is not None:
        return None
    option = "--scheme " if VARIABLE in os.environ else f"{VARIABLES['scheme']}="
    return Summary(
        workers=len(agreed.workers),
        global_batch_size=agreed.problem.global_batch_size,
        scheme=agreed.scheme.name,
        say=say if marks is None else partial(leave_line, marks),
        then='scheme="lb-bsp" in the script' if launched.scheme is None else f"the same command with {option}lb-bsp",
    )


def run_event(agreed: Agreed, rank: int, *, iterations: int, seed: int, torch: str = "") -> Run:
    """Return the first event of a log; an epoch has this many iterations."""
    mine, problem = agreed.workers[rank], agreed.problem
    return Run(
        worker=rank,
        schema=SCHEMA,
        at=time.perf_counter(),
        unix_seconds=time.time(),
        workers=len(agreed.workers),
        scheme=agreed.scheme.name,
        engine="collective" if agreed.scheme.served is None else "server",
        global_batch_size=problem.global_batch_size,
        iterations_per_epoch=iterations,
        minimum=problem.minimum.tolist(),
        maximum=problem.maximum.tolist(),
        multiple=problem.multiple,
        seed=seed,
        emulated=agreed.own.emulated,
        version=mine["version"],
        torch=torch,
        python=platform.python_version(),
        host=mine["host"],
        gpu=mine.get("gpu"),
        device=mine["device"],
        command=command(),
        commit=commit_of(Path(sys.argv[0]).absolute().parent),
    )


def command() -> str:
    """The script and its arguments, as typed in a shell, with `***` for keys, tokens, secrets and passwords."""
    words, hidden = [Path(sys.argv[0]).name], False
    for word in sys.argv[1:]:
        option = _SECRET.match(word)
        if option is not None:
            word = option[0] + "***" * option[0].endswith("=")
        words.append("***" if hidden and not word.startswith("-") else word)
        hidden = option is not None and not option[2]
    return shlex.join(words).replace("'***'", "***")


def commit_of(folder: Path) -> str:
    """The commit that the git repository around a folder has checked out, 12 digits; empty if there is none.

    Its files say so, without a process of git, which would copy a process that may hold threads and devices.
    """
    with suppress(OSError, ValueError):
        found = next((each / ".git" for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if found is None:
            return ""
        if found.is_file():  # A worktree or a submodule.
            found = found.parent / found.read_text().removeprefix("gitdir:").strip()
        head = (found / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        name, common = head.removeprefix("ref: "), found / "commondir"
        shared = found / common.read_text().strip() if common.exists() else found
        if (shared / name).exists():
            return (shared / name).read_text().strip()[:12]
        packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
        return next((words[0][:12] for words in packed if words[1:] == [name]), "")
    return ""

"""Keeps the basis of the sizes in a file, so that the next start of the run begins with the sizes of the last."""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import LoadPolicy
from evenstep.core.values import Problem
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.telemetry.regular import read_regular
from evenstep.worker.hold import Hold

FILE: Final = "last-sizes.json"
SELDOM: Final = 200
_SHOWN: Final = 80


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The circumstances for which the speeds of workers hold.

    Attributes:
        version: The version of evenstep, because its policies remember different things in different versions.
        scheme: The scheme string.
        parameters: The number of parameters of the model; None if it is not known.
        workers: By rank, a text that identifies this worker: its host, its device, and what it emulates.
    """

    version: str
    scheme: str
    parameters: int | None
    workers: tuple[str, ...]


@final
class LastSizes:
    """Keeps a policy's memory in folders: on the first worker, of a scheme that decides by speed.

    Sizes may change in every iteration, so writing takes at most one part in `SELDOM` of the time.

    Args:
        folders: Where the next start may look for it.
        setting: The circumstances for which the speeds hold.
        clock: Returns seconds that only rise.
    """

    def __init__(
        self, folders: Sequence[Path], setting: Setting, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._folders = folders
        self._setting = asdict(setting)
        self._clock = clock
        self._due = -math.inf
        self._changed = False

    def keep(self, policy: LoadPolicy, *, changed: bool) -> None:
        """Replace what was kept if sizes have `changed` since, and if enough time has passed."""
        self._changed |= changed
        began = self._clock()
        if self._changed and began >= self._due:
            self._write(policy)
            self._changed, now = False, self._clock()
            self._due = now + SELDOM * (now - began)

    def _write(self, policy: LoadPolicy) -> None:
        """Write the file, without an error if the disk is full or the policy's memory is not JSON."""
        with suppress(OSError, TypeError, ValueError):
            kept = {"setting": self._setting, "policy": policy.state_dict()}
            text = json.dumps({**kept, "digest": _digest(kept)})
            for folder in self._folders:
                path = folder / f"{FILE}.new"
                path.write_text(text, encoding="utf-8")
                path.replace(folder / FILE)


def identity_of(device: str, hold: Hold | None) -> str:
    """Return a text that identifies this worker, in the next start too: its device, and what is emulated on it."""
    if hold is None:
        return device
    emulated = repr((hold.disturbance, hold.largest_batch, hold.memory)).encode()
    return f"{device}, emulating {hashlib.blake2b(emulated, digest_size=4).hexdigest()}"


def earlier_start(launched: LaunchSettings, run_dir: Path | None, rank: int) -> dict[str, Any] | None:
    """Find an earlier start on the first worker, which tells the others in its record; None on other workers.

    It looks where a restart under `evenstep run` finds it, then where the user says, then in the run directory.
    """
    if rank:
        return None
    places = [
        (None if place is None else Path(place) / FILE, given)
        for place, given in ((launched.marks, False), (launched.start_from, True), (run_dir, False))
    ]
    there = [(path, given) for path, given in places if path is not None and (given or os.path.exists(path))]
    if not there:
        return None
    path, given = there[0]
    return {"folder": str(path.parent), "given": given, "kept": _read(path)}


def last_sizes(
    scheme: Scheme, records: Sequence[Mapping[str, Any]], launched: LaunchSettings, run_dir: Path | None, rank: int
) -> LastSizes | None:
    """Return the keeper of the sizes for the next start; None if another worker has it, or nothing is kept."""
    folders = [Path(folder) for folder in (launched.marks, run_dir) if folder is not None]
    if rank or not folders or not _remembers(scheme):
        return None
    return LastSizes(folders, _setting(scheme, records))


def first_policy(scheme: Scheme, problem: Problem, records: Sequence[Mapping[str, Any]], rank: int) -> LoadPolicy:
    """Make a policy, with the memory of the earlier start that worker 0 has found, if it holds for these workers.

    All workers decide alike, from their records. The first one logs what became of it.
    """
    earlier, policy = records[0].get("earlier"), scheme.policy(len(records))
    if earlier is None:
        return policy
    why = "sizes do not follow speeds here" if not _remembers(scheme) else _unlike(earlier["kept"], scheme, records)
    if why is None:
        try:
            policy.load_state_dict(earlier["kept"]["policy"])
            policy.allocate(problem)
        except (AttributeError, ConfigError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            why = f"what it kept is damaged ({type(error).__name__})"
            policy = scheme.policy(len(records))
    if rank == 0:
        logger = logging.getLogger("evenstep")
        if why is None:
            logger.info("sizes begin as the run in %s left them", earlier["folder"])
        else:
            level = logging.WARNING if earlier["given"] else logging.INFO
            logger.log(level, "sizes do not begin as the run in %s left them: %s", earlier["folder"], why)
    return policy


def _remembers(scheme: Scheme) -> bool:
    """True if workers decide the sizes from what they remember of their speeds; on servers, the servers do."""
    return scheme.served is None and scheme.load.follows_speed


def _setting(scheme: Scheme, records: Sequence[Mapping[str, Any]]) -> Setting:
    first = records[0]
    return Setting(
        version=first["version"],
        scheme=scheme.name,
        parameters=first.get("parameters"),
        workers=tuple(record["identity"] for record in records),
    )


def _unlike(kept: object, scheme: Scheme, records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why what was kept does not hold for these workers; None if it does."""
    if kept is None:
        return f"there is no {FILE} of a run in which sizes followed speeds"
    if not isinstance(kept, dict):
        return f"{FILE} {kept}" if isinstance(kept, str) else f"{FILE} is damaged"
    try:
        then = msgspec.convert(kept, _Kept)
    except msgspec.ValidationError as error:
        return f"{FILE} is damaged ({error})"
    # Otherwise values that no policy has would be found iterations later, if at all.
    if then.digest != _digest({"setting": kept["setting"], "policy": kept["policy"]}):
        return f"{FILE} is damaged, or was edited"
    return difference(then.setting, _setting(scheme, records))


def difference(then: Setting, now: Setting) -> str | None:
    """Return the first difference that makes earlier speeds useless now, as half a sentence; None without any.

    >>> one = Setting(version="1", scheme="lb-bsp", parameters=8, workers=("a", "b"))
    >>> difference(one, Setting(version="1", scheme="lb-bsp", parameters=8, workers=("a",)))
    'it had 2 workers and now there is 1'
    """
    if then.version != now.version:
        return f"it ran evenstep {then.version[:_SHOWN]} and this is {now.version}"
    if then.scheme != now.scheme:
        return f"its scheme was {then.scheme[:_SHOWN]} and this one is {now.scheme}"
    if then.parameters != now.parameters:
        return f"its model had {_number(then.parameters)} parameters and this one has {_number(now.parameters)}"
    count = len(now.workers)
    if len(then.workers) != count:
        return f"it had {len(then.workers)} workers and now there {'is' if count == 1 else 'are'} {count}"
    for rank, (before, present) in enumerate(zip(then.workers, now.workers, strict=True)):
        if before != present:
            return f"its worker {rank} was {before[:_SHOWN]} and now is {present}"
    return None


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)


class _Kept(msgspec.Struct):
    setting: Setting
    policy: dict[str, Any]
    digest: str


def _digest(kept: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> object:
    """Read a file as JSON. Returns a text that says why if it cannot be read, and None if it is not there."""
    try:
        return json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror or type(error).__name__}"
    except (ValueError, RecursionError):
        return "is damaged: it is not JSON"

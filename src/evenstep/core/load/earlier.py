"""Whether the speeds that an earlier start of a run has learned hold for this one."""

from dataclasses import dataclass
from typing import Final, final

_SHOWN: Final = 80


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the speeds of workers belong to.

    Attributes:
        version: Of evenstep, whose policies differ between versions in what they remember.
        scheme: The scheme string.
        parameters: How many the model has; None if it is not known.
        workers: By rank, a text that tells this worker from others: its host, its device, and what it emulates.
    """

    version: str
    scheme: str
    parameters: int | None
    workers: tuple[str, ...]


def difference(then: Setting, now: Setting) -> str | None:
    """The first difference that makes the speeds of an earlier start useless now, as half a sentence; None without.

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

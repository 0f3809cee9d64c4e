"""Error messages, the same on every worker, for values that differ between workers and must not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, final

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.workers import minority, name_workers

_PLURAL: Final = {"has": "have", "is in": "are in", "is at": "are at", "weighs by": "weigh by"}
_LONGEST: Final = 100
"""The most letters of a value that a message shows."""
_NONE: Final = "none"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value that must be the same on all workers.

    Attributes:
        phrase: the text for a worker's value, with `{}` in its place.
        none: used instead if there is no value.
        then: what to do.
    """

    phrase: str
    verb: str = "has"
    none: str = ""
    then: str = "start every worker with the same"


def disagreement(field: Field, values: Sequence[object]) -> str | None:
    """One sentence about the workers whose value differs from the majority's, by rank; None if all are the same.

    >>> disagreement(Field(phrase="a dataset of {} samples"), [90, 90, 91])
    'worker 2 has a dataset of 91 samples where the others have 90: start every worker with the same'
    """
    texts = [_text(value) for value in values]
    odd = minority([json.dumps(value) for value in values])
    if not odd:
        return None
    others = [rank for rank in range(len(texts)) if rank not in odd]
    held = list(dict.fromkeys(texts[rank] for rank in odd))
    what = field.none if held == [_NONE] and field.none else field.phrase.format(" and ".join(held))
    who = name_workers(others) if len(others) == 1 else "the others"
    verbs = [field.verb if len(ranks) == 1 else _PLURAL[field.verb] for ranks in (odd, others)]
    return f"{name_workers(odd)} {verbs[0]} {what} where {who} {verbs[1]} {texts[others[0]]}: {field.then}"


def require_agreement(records: Sequence[Mapping[str, Any]], fields: Mapping[str, Field]) -> None:
    """Check that all workers hold the same value under each key of `fields`; `records` by rank.

    Raises:
        DisagreementError: They do not. The message names the minority and is the same on every worker.
    """
    for key, field in fields.items():
        said = disagreement(field, [record[key] for record in records])
        if said is not None:
            raise DisagreementError(said)


NOTHING_ASKED: Final[Mapping[str, object]] = MappingProxyType({"scheme": None, "servers": None})
_SCHEME: Final = Field(phrase="the scheme {}")
_MESH: Final = Field(phrase="the mesh {}", none="no mesh", then="give every process the same mesh and data_dims")


def require_same_way(asked: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Check that all workers want to join each other in the same way, before any of them waits for the others.

    Args:
        asked: By rank: the `scheme` that the worker was asked for, its number of `servers` or None, and its `mesh`, if
            it has one; or an `error`.
        rank: This worker's rank.

    Raises:
        ConfigError: A worker was asked for something wrong; raised on all workers.
        DisagreementError: The workers are to join different numbers of servers, or have other meshes.
    """
    for worker, each in enumerate(asked):
        if "error" in each:
            own = asked[rank].get("error")
            raise ConfigError(own or f"worker {worker}: {each['error']}")
    if len({each["servers"] for each in asked}) > 1:
        raise DisagreementError(disagreement(_SCHEME, [each["scheme"] for each in asked]))
    if said := disagreement(_MESH, [each.get("mesh") for each in asked]):
        raise DisagreementError(said)


_ARRAY: Final = Field(phrase="{}", none="nothing", then="start every worker with the same model and optimizer")


def require_same_arrays(layouts: Sequence[Sequence[str]]) -> None:
    """Check that all workers exchange the same arrays, given a description of each array, by rank.

    Raises:
        DisagreementError: They do not. The message has the first difference.
    """
    for values in zip_longest(*layouts):
        said = disagreement(_ARRAY, values)
        if said is not None:
            raise DisagreementError(said)


_EVERY_BATCH: Final = (
    "every worker must take every batch of the loader, run backward on it, and compute batches in their order"
    " (loader.computes says which one is computed)"
)
TOGETHER: Final = "begin and leave each loop over data of the workers' own on all of them together"
_SAME_SIZES: Final = (
    "compute every batch of a local period before the first of the next is fetched, and start every worker with the"
    " same packages"
)
WEIGHED: Final = Field(phrase="{}", verb="weighs by", then="call weigh_by on every worker or on none")
_PLAN: Final[Mapping[str, Field]] = {
    "loader": Field(phrase="loader {}", verb="is at", then="loop over the loaders in the same order on all workers"),
    "epoch": Field(phrase="epoch {}", verb="is in", then="loop over the same epochs on all workers"),
    "iteration": Field(phrase="iteration {}", verb="is at", then=_EVERY_BATCH),
    "slice": Field(phrase="slice {} of the epoch", verb="is at", then=_EVERY_BATCH),
    "weighed": WEIGHED,
    "steps": Field(phrase="{} optimizer steps", then="step on all workers or on none"),
    "sizes": Field(phrase="the batch sizes {}", then=_SAME_SIZES),
}
_RATE: Final = "give all the same (one that follows a metric must follow loader.mean_over_workers)"


def refuse_other_plans(exchange_plans: Callable[[], Sequence[Mapping[str, Any]]], fingerprints: Sequence[int]) -> None:
    """Raise the error that names the workers that computed another iteration than the others.

    Args:
        exchange_plans: Returns all plans, by rank. Called on all workers.
            If a worker has left its loop, the call raises RuntimeError after the timeout of a collective.
        fingerprints: Hashes of the workers' plans, not all equal; the same on every worker.

    Raises:
        DisagreementError: Always; with the same message on every worker.
    """
    odd = minority([str(each) for each in fingerprints])
    try:
        plans = exchange_plans()
    except RuntimeError as error:
        raise DisagreementError(
            f"{name_workers(odd)} did not do the same iteration as the others: {_EVERY_BATCH}"
        ) from error
    raise DisagreementError(_about_plans(plans))


def _about_plans(plans: Sequence[Mapping[str, Any]]) -> str:
    said = (disagreement(field, [each[key] for each in plans]) for key, field in _PLAN.items())
    return next(filter(None, said), None) or _about_rates(plans)


def _about_rates(plans: Sequence[Mapping[str, Any]]) -> str:
    rates = [each["rates"] for each in plans]
    groups = disagreement(Field(phrase="{} param groups in its optimizers"), [len(each) for each in rates])
    if groups is not None:
        return groups
    for number in range(len(rates[0])):
        where = f" in param group {number}" if len(rates[0]) > 1 else ""
        field = Field(phrase=f"a learning rate of {{}}{where} in iteration {plans[0]['iteration']}", then=_RATE)
        said = disagreement(field, [each[number] for each in rates])
        if said is not None:
            return said
    return "the workers' plans have other fingerprints than values: start every worker with the same packages"


def _text(value: object) -> str:
    if value is None:
        return _NONE
    text = repr(value) if isinstance(value, str | bool) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

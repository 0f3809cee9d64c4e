"""A run in two to four lines, for the terminal at its end: how fast it was, why, and on which batch sizes."""

from collections.abc import Sequence
from typing import Final

from evenstep.core.account.account import Account
from evenstep.core.account.cause import Cause
from evenstep.core.account.length import duration
from evenstep.core.account.served_totals import ServedTotals
from evenstep.core.account.verdict import verdict_of

_MAX_SIZES: Final = 8


def summary_lines(account: Account, scheme: str) -> list[str]:
    """The lines for a run behind a barrier; none where no iteration was finished."""
    if not account.iterations:
        return []
    first, last = account.first_sizes, account.last_sizes
    sizes = f"batch sizes {_sizes(last)}"
    if last != first:
        sizes = f"batch sizes {_sizes(first)} at first, {_sizes(last)} at the end"
    head = _head(scheme, account.workers, account.seconds, float(account.samples.sum()))
    verdict = verdict_of(account, range(account.workers), scheme)
    if account.workers == 1 and verdict.cause is not Cause.INPUT:
        return [f"{head}."]
    return [f"{head}; {sizes}.", *_sentences(verdict.text)]


def served_summary_lines(totals: ServedTotals, scheme: str, *, name_lost: bool = True) -> list[str]:
    """The lines for a run on servers; none where no worker has finished. `name_lost` as in `served_verdict`."""
    workers = totals.workers()
    if not totals.finished or not workers:
        return []
    head = _head(scheme, len(workers), totals.seconds, float(totals.samples))
    if len(workers) == 1:
        return [f"{head}."]
    return [
        f"{head}; batch sizes {_sizes(totals.batch_sizes())}.",
        *_sentences(totals.verdict(name_lost=name_lost).text),
    ]


def _head(scheme: str, workers: int, seconds: float, samples: float) -> str:
    who = "1 worker" if workers == 1 else f"{workers:,} workers"
    return f"{scheme} trained {samples / max(seconds, 1e-9):,.0f} samples/s for {duration(seconds)} on {who}"


def _sizes(sizes: Sequence[int]) -> str:
    if len(sizes) > _MAX_SIZES:
        return f"from {min(sizes)} to {max(sizes)}"
    return " ".join(map(str, sizes))


def _sentences(text: str) -> list[str]:
    return [f"{sentence.rstrip('.')}." for sentence in text.split(". ") if sentence]

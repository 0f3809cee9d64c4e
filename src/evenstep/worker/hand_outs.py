"""Finds the batch of a forward pass, with a queue between the batches handed out and those computed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final
from weakref import ref

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Share

_RECENT: Final = 16
"""How many batches before the current one are known by form. By memory, all are that the script keeps."""


@final
@dataclass(slots=True, eq=False)
class Origin:
    """Stands for one of the loaders of a session.

    Attributes:
        number: Its index among them, in the order in which they were given.
        batch: Its current batch.
        computed: Whether a forward pass was on a batch of its current loop, or last one; None if none was handed out.
        stepped: The `iteration` of the batch that was current when an optimizer last stepped.
    """

    number: int = 0
    batch: "HandedOut | None" = None
    computed: bool | None = None
    stepped: int = 0


@final
class HandedOut(msgspec.Struct, eq=False, kw_only=True):
    """A batch, or a micro-batch, that the loader has handed out.

    Attributes:
        origin: The loader that handed it out.
        iteration: How many iterations this loader has handed out with it.
        done: How many iterations of its epoch this loader has handed out with it.
        weight: The weight of its gradient, if its engine knows it beforehand.
        units: The units that the script has counted in it (`weigh_by`), as its engine keeps them; None if it has not.
        passed: The forward passes of each model on it, in the order of their first.
        open: Whether a forward pass waits for its backward.
        backward: Whether a backward has begun.
        closed: Whether its gradient has been synchronised, pushed or stepped on.
        checksum: Of a few of its values, to compare with those of peers; 0 if they are not compared.
        traces: The means by which the engine recognises its tensors; `own` holds weak references to their memory.
        claimed: On servers, the engine's data about its claim.
    """

    share: Share
    piece: Share
    epoch: int
    origin: Origin = msgspec.field(default_factory=Origin)
    iteration: int = 0
    done: int = 0
    weight: float | None = None
    units: Any = None
    passed: dict[int, int] = {}
    open: bool = False
    backward: bool = False
    closed: bool = False
    checksum: int = 0
    traces: Any = None
    claimed: Any = None

    @property
    def finished(self) -> bool:
        """True if its gradient is complete."""
        return self.closed or bool(self.passed and not self.open)

    @property
    def computed(self) -> bool:
        """True if it has a gradient, even if a later forward pass had no backward."""
        return self.backward or self.finished

    @property
    def accumulates(self) -> bool:
        """True if gradients wait for more micro-batches of its iteration."""
        return not self.piece.last if self.backward else not self.piece.first

    def weighs_as(self, other: "HandedOut") -> bool:
        """True if the gradients of both have the same weight."""
        return self is other or (self.units is None is other.units and self._counts() == other._counts())

    def _counts(self) -> tuple[float | None, int, int, int, float]:
        sizes = self.share.sizes
        return self.weight, self.piece.samples, int(sizes.sum()), int((sizes > 0).sum()), self.piece.portion


class Evidence(Protocol):
    """The inputs of a forward pass, to compare with batches that were handed out."""

    def same(self, batch: HandedOut, /) -> bool:
        """True if some of the inputs lie in this batch's memory."""

    def alike(self, batches: Sequence[HandedOut], /) -> list[HandedOut]:
        """Return those of these batches that have the form of the inputs; none if their form fits no batch."""


@final
class HandOuts:
    """The current batch, those that were fetched ahead of it, and those before it.

    A batch becomes current at its hand-out if the one before is finished. Otherwise it waits for its forward pass. If
    several batches wait, a forward pass is of the batch in whose memory its inputs lie. Inputs that were copied, for
    example to a device, are known by their form: batches are computed in order, and the form must fit the batch whose
    turn it is, or exactly one other batch. If the form cannot tell, batches of equal weight need not be told apart.
    The inputs are not looked at if no batch waits, the script has dropped all earlier ones, and the model has not
    computed the current one yet.

    If two batches weigh differently, their lengths differ on some worker. So a form that fits both on this worker fits
    one of them on another. Workers that take a forward pass for different batches then disagree on the iteration, which
    is an error before the optimizer steps.
    """

    def __init__(self) -> None:
        self.in_hand: HandedOut | None = None
        self.ahead: deque[HandedOut] = deque()
        self._told = False
        self._sure = True
        """True if the current batch is certain. If not, it only has the same weight as the one that is computed."""
        self._moves = 0
        self._past: list[HandedOut] = []
        """Batches before the current one: the latest, and all whose tensors the script may still keep."""
        self._memory: set[ref[Any]] = set()
        """Weak references to the tensors' memory of those."""
        self._passes: dict[int, int] = {}
        """The most forward passes of each model on any batch before the current one."""

    def ask(self) -> None:
        """Called when the script asks for a batch: it is finished with the current one if that is complete."""
        if self.in_hand is not None and self.in_hand.passed:
            self._told = False  # The script must tell each batch.
        if self.ahead and self.in_hand is not None and self.in_hand.finished:
            self._moves = min(self._moves + 1, len(self.ahead))

    def put(self, batch: HandedOut) -> bool:
        """Add a batch that is handed out; return True if it becomes current at once."""
        now = self.in_hand
        if self.ahead or (now is not None and not (self._sure and (now.closed or now.finished))):
            self.ask()
            last, waits = batch.origin.batch, any(each.origin is batch.origin for each in self.ahead)
            if now is not None and now.origin is not batch.origin and (last is None or last.finished) and not waits:
                batch.origin.batch = batch  # The script is finished with all batches of this loader.
            self.ahead.append(batch)
            return False
        if now is not None:
            self._told = self._told and not now.passed  # As in `ask`.
        self._make_current(batch)
        return True

    def _make_current(self, batch: HandedOut) -> None:
        before, self.in_hand = self.in_hand, batch
        batch.origin.batch = batch
        if before is None:
            return
        for model, passes in before.passed.items():
            self._passes[model] = max(passes, self._passes.get(model, 0))
        self._past.append(before)
        if before.traces is not None:
            self._memory |= before.traces.own
        if len(self._past) > 2 * _RECENT:
            kept = [each for each in self._past[:-_RECENT] if each.traces and any(map(ref.__call__, each.traces.own))]
            self._past = kept + self._past[-_RECENT:]
            self._memory = set().union(*(each.traces.own for each in self._past if each.traces))

    @property
    def done(self) -> bool:
        """True if the script is finished with all batches that were handed out."""
        return self._sure and not self.ahead and self.in_hand is not None and self.in_hand.finished

    @property
    def due(self) -> HandedOut | None:
        """The batch that is likely to be computed next, if the script is `between` batches."""
        now = self.in_hand
        if not self.ahead or (now is not None and not now.passed):
            return now
        return self.ahead[max(self._moves - 1, 0)]

    def latest_of(self, origin: Origin) -> HandedOut | None:
        """Return the loader's current batch, or its newest if none has been computed yet."""
        now = origin.batch
        ahead = [each for each in self.ahead if each.origin is origin] if self.ahead else ()
        return now if not ahead or (now is not None and now.passed) else ahead[-1]

    @property
    def between(self) -> bool:
        """True if the script is finished with the current batch: the next forward pass then tells which follows it."""
        now = self.in_hand
        return bool(self.ahead) and now is not None and (not now.open or now.units is not None)

    def of_forward(self, model: int, look: Callable[[], Evidence]) -> HandedOut | None:
        """Return the batch that a forward pass of this model is of; None before the first hand-out.

        `look` returns the inputs, which are not looked at in a plain loop.

        Raises:
            ConfigError: It cannot be known, and the batches in question have different weights.
        """
        now = self.in_hand
        if now is None or self._told:
            return now
        if not self.ahead and model not in now.passed and not any(map(ref.__call__, self._memory)):
            self._memory.clear()
            return now
        inputs = look()
        if not self.ahead and inputs.same(now):
            return now
        known = [each for each in (now, *self.ahead) if inputs.same(each)]
        if not known:
            self._require_not_past(model, now, inputs)
        if not self.ahead:
            return now
        if len(known) == 1:
            self._sure = True
            return known[0]
        turns = self._turns(model, now)
        batches = known or ([*self.ahead] if now not in turns and not now.passed else [now, *self.ahead])
        likely = inputs.alike(batches)
        found = next((each for each in turns if each in likely), None)
        if found is None and len(likely) == 1:
            found = likely[0]
        if found is None and all(each.weighs_as(batches[0]) for each in batches):
            found = next((each for each in turns if each in batches), batches[0])
        if found is None:
            raise ConfigError(
                f"{len(self.ahead)} batches were fetched before the forward pass of the current batch, and which of"
                " them a forward pass is of cannot be told from its inputs: fetch a batch after the backward of the"
                " last one, or call loader.computes(batch) before its first forward pass"
            )
        self._sure = likely == [found]
        return found

    def _turns(self, model: int, now: HandedOut) -> list[HandedOut]:
        """Return the possible batches of this model's forward pass in a script that skips none, likeliest first."""
        following = self.ahead[self._moves - 1 if self._moves and self._sure else 0]
        if now.closed and not now.passed:
            return [following]  # The loop over it was left.
        if not now.passed:
            return [now]
        # A batch begins with the model that began the last one, after the backward of the last one.
        begins = model == next(iter(now.passed)) and not now.open
        return [following, self.ahead[0], now] if begins else [now, following]

    def _require_not_past(self, model: int, now: HandedOut, inputs: Evidence) -> None:
        past = [each for each in self._past if inputs.same(each)]
        if not past and model in now.passed:
            # Recent batches that have the form of the inputs, if neither the current nor a later one has it.
            recent = self._past[-_RECENT:]
            likely = inputs.alike([now, *self.ahead, *recent])
            past = likely if all(each in recent for each in likely) else []
        if not all(each.weighs_as(now) for each in past):
            raise ConfigError(
                "a forward pass was of a batch that had been handed out before the current one, and the two have"
                " different weights: compute each batch before the next one begins, or call loader.computes(batch) if"
                " it was of the current batch"
            )

    def kept(self, inputs: Evidence) -> bool:
        """True if a forward pass is of a batch before the current one."""
        return any(inputs.same(each) for each in self._past)

    def beyond(self, model: int, inputs: Evidence) -> bool:
        """True if a forward pass after the end of the loop is of none of its batches.

        That is so if the last batch has had as many forward passes of the model as any batch before it.
        """
        now = self.in_hand
        if now is None or self.ahead or not now.finished or inputs.same(now):
            return False
        return model in self._passes and now.passed.get(model, 0) >= self._passes[model]

    def tell(self, batch: object) -> HandedOut | None:
        """Return the batch that the script says it computes from now on; None if it is none of these."""
        self._told = True
        batches = [] if self.in_hand is None else [self.in_hand, *self.ahead]
        return next((each for each in batches if each.traces.of(batch)), None)

    def skip_to(self, batch: HandedOut) -> None:
        """Make this batch current. Those before it are not computed any more."""
        self._moves = 0
        while self.in_hand is not batch:
            self._make_current(self.ahead.popleft())

    def abandon(self, origin: Origin) -> None:
        """Give up the batches that this loader handed out: they are not computed any more."""
        self.ahead = deque(each for each in self.ahead if each.origin is not origin)
        self._moves, self._sure = 0, True
        if origin.batch is not None:
            origin.batch.closed = True

"""Which batch a forward pass is of: a queue between the batches that are handed out and those that are computed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

from evenstep.core.errors import ConfigError
from evenstep.core.samples import MicroBatch, Share

_RECENT: Final = 16
"""How many batches before the one in hand are known by their form; by their memory all are that the script keeps."""


@final
@dataclass(slots=True, eq=False)
class Origin:
    """Stands for a loader among those of a session.

    Attributes:
        number: Which of them it is, in the order in which they were given.
        batch: Its batch in hand.
        computed: Whether a forward pass was on a batch of its present loop, or last one; None if none was handed out.
    """

    number: int = 0
    batch: "HandedOut | None" = None
    computed: bool | None = None


@final
@dataclass(slots=True, eq=False, kw_only=True)
class HandedOut:
    """A batch, or a micro-batch, that the loader has handed out.

    Attributes:
        origin: The loader that handed it out.
        iteration: How many iterations this loader has handed out with it.
        done: How many iterations of its epoch were.
        weight: What its gradient counts, where its engine knows that beforehand.
        units: What the script has counted in it (`weigh_by`), as its engine keeps it; None if it has not.
        passed: The forward passes of each model on it, in the order of their first.
        open: Whether a forward pass waits for its backward.
        backward: Whether a backward has begun.
        closed: Whether its gradient has been synchronised, pushed or stepped on.
        traces: What the engine recognises its tensors by.
        claimed: What its engine knows of its claim, on servers.
    """

    share: Share
    piece: MicroBatch
    epoch: int
    origin: Origin = field(default_factory=Origin)
    iteration: int = 0
    done: int = 0
    weight: float | None = None
    units: Any = None
    passed: dict[int, int] = field(default_factory=dict)
    open: bool = False
    backward: bool = False
    closed: bool = False
    traces: Any = None
    claimed: Any = None

    @property
    def finished(self) -> bool:
        """Whether its gradient is complete."""
        return self.closed or bool(self.passed and not self.open)

    @property
    def computed(self) -> bool:
        """Whether it has a gradient, even if there was a forward pass without a backward since."""
        return self.backward or self.finished

    def weighs_as(self, other: "HandedOut") -> bool:
        """Whether the gradients of both count alike."""
        return self is other or (self.units is None is other.units and self._counts() == other._counts())

    def _counts(self) -> tuple[float | None, int, int, int, float]:
        sizes = self.share.sizes
        return self.weight, self.piece.samples, int(sizes.sum()), int((sizes > 0).sum()), self.piece.portion


class Evidence(Protocol):
    """What a forward pass was given, compared with batches that were handed out."""

    def same(self, batch: HandedOut, /) -> bool:
        """Whether some of it lies in this batch's memory."""

    def alike(self, batches: Sequence[HandedOut], /) -> list[HandedOut]:
        """Those of these batches whose form it has; none if it has another form than all of them."""


@final
class HandOuts:
    """The batch in hand, those that were fetched ahead of it, and those before it.

    A batch is in hand from its hand-out if the one before is finished. Otherwise it waits for its forward pass. If
    several batches wait, a forward pass is of the batch in whose memory its inputs lie. Inputs that were copied, as to
    a device, are known by their form: batches are computed in their order, and the form must be that of the batch whose
    turn it is, or of one other batch alone. If the form cannot tell, batches that weigh alike need not be told apart.

    If two batches weigh differently, their lengths differ on some worker. So a form that fits both on this worker fits
    one of them on another, and workers that take a forward pass for different batches disagree on the iteration, which
    is an error before the optimizer steps.
    """

    def __init__(self) -> None:
        self.in_hand: HandedOut | None = None
        self.ahead: deque[HandedOut] = deque()
        self._told = False
        self._sure = True
        """Whether the batch in hand is certain. If not, it only weighs as much as the one that is computed."""
        self._moves = 0
        self._past: list[HandedOut] = []
        """Batches before the one in hand: the latest, and all whose tensors the script keeps."""
        self._passes: dict[int, int] = {}
        """The most forward passes of each model on one of those."""

    def ask(self) -> None:
        """The script asks for a batch, so it is done with the one in hand if that is finished."""
        if self.in_hand is not None and self.in_hand.passed:
            self._told = False  # The script must tell each batch.
        if self.ahead and self.in_hand is not None and self.in_hand.finished:
            self._moves = min(self._moves + 1, len(self.ahead))

    def put(self, batch: HandedOut) -> bool:
        """A batch is handed out; whether it is in hand at once."""
        now = self.in_hand
        self.ask()
        if self.ahead or (now is not None and not self.done):
            if now is not None and now.origin is not batch.origin and self._done_with(batch.origin):
                batch.origin.batch = batch
            self.ahead.append(batch)
            return False
        self._leave_behind(now)
        self.in_hand = batch.origin.batch = batch
        return True

    def _leave_behind(self, batch: HandedOut | None) -> None:
        if batch is None:
            return
        for model, passes in batch.passed.items():
            self._passes[model] = max(passes, self._passes.get(model, 0))
        old, recent = self._past[: 1 - _RECENT], self._past[1 - _RECENT :]
        self._past = [*[each for each in old if each.traces and each.traces.kept], *recent, batch]

    def _done_with(self, origin: Origin) -> bool:
        """Whether the script is done with all that this loader handed out."""
        last = origin.batch
        return (last is None or last.finished) and all(each.origin is not origin for each in self.ahead)

    @property
    def done(self) -> bool:
        """Whether the script is done with all that was handed out."""
        return self._sure and not self.ahead and self.in_hand is not None and self.in_hand.finished

    @property
    def due(self) -> HandedOut | None:
        """The batch that is likely to be computed next, if the script is `between` batches."""
        now = self.in_hand
        if not self.ahead or (now is not None and not now.passed):
            return now
        return self.ahead[max(self._moves - 1, 0)]

    def latest_of(self, origin: Origin) -> HandedOut | None:
        """The loader's batch in hand, or if none has been computed yet, its newest."""
        now = origin.batch
        ahead = [each for each in self.ahead if each.origin is origin] if self.ahead else ()
        return now if not ahead or (now is not None and now.passed) else ahead[-1]

    @property
    def between(self) -> bool:
        """Whether the script is done with the batch in hand, so that the next forward pass tells which follows it."""
        now = self.in_hand
        return bool(self.ahead) and now is not None and (not now.open or now.units is not None)

    def of_forward(self, model: int, inputs: Evidence) -> HandedOut | None:
        """The batch that a forward pass of this model is of; None before the first hand-out.

        Raises:
            ConfigError: It cannot be known, and the batches in question have different weights.
        """
        now = self.in_hand
        if now is None or self._told:
            return now
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
                f"{len(self.ahead)} batches were fetched before the forward pass of the batch in hand, and which of"
                " them a forward pass is of cannot be told from its inputs: fetch a batch after the backward of the"
                " last one, or call loader.computes(batch) before its first forward pass"
            )
        self._sure = likely == [found]
        return found

    def _turns(self, model: int, now: HandedOut) -> list[HandedOut]:
        """The batches that a forward pass of this model may be of in a script that skips none, likeliest first."""
        following = self.ahead[self._moves - 1 if self._moves and self._sure else 0]
        if now.closed and not now.passed:
            return [following]  # Its loop was left.
        if not now.passed:
            return [now]
        # A batch begins with the model that began the last one, after the backward of the last one.
        begins = model == next(iter(now.passed)) and not now.open
        return [following, self.ahead[0], now] if begins else [now, following]

    def _require_not_past(self, model: int, now: HandedOut, inputs: Evidence) -> None:
        past = [each for each in self._past if inputs.same(each)]
        if not past and model in now.passed:
            past = self._looks_past(now, inputs)
        if not all(each.weighs_as(now) for each in past):
            raise ConfigError(
                "a forward pass was of a batch that had been handed out before the one in hand, and the two have"
                " different weights: compute each batch before the next one begins, or call loader.computes(batch) if"
                " it was of the batch in hand"
            )

    def _looks_past(self, now: HandedOut, inputs: Evidence) -> list[HandedOut]:
        """Recent batches whose form the inputs have, if no batch from the one in hand on has it."""
        recent = self._past[-_RECENT:]
        likely = inputs.alike([now, *self.ahead, *recent])
        return likely if all(each in recent for each in likely) else []

    def kept(self, inputs: Evidence) -> bool:
        """Whether a forward pass is of a batch before the one in hand."""
        return any(inputs.same(each) for each in self._past)

    def beyond(self, model: int, inputs: Evidence) -> bool:
        """Whether a forward pass after the end of the loop is of none of its batches.

        It is if the last batch has had as many forward passes of the model as any batch before it.
        """
        now = self.in_hand
        if now is None or self.ahead or not now.finished or inputs.same(now):
            return False
        return model in self._passes and now.passed.get(model, 0) >= self._passes[model]

    def tell(self, batch: object) -> HandedOut | None:
        """The batch that the script says it computes from now on; None if it is none of these."""
        self._told = True
        batches = [] if self.in_hand is None else [self.in_hand, *self.ahead]
        return next((each for each in batches if each.traces.of(batch)), None)

    def skip_to(self, batch: HandedOut) -> None:
        """This batch is in hand; those before it are not computed any more."""
        self._moves = 0
        while self.in_hand is not batch:
            self._leave_behind(self.in_hand)
            self.in_hand = self.ahead.popleft()
            self.in_hand.origin.batch = self.in_hand

    def abandon(self, origin: Origin) -> None:
        """What this loader handed out is not computed any more."""
        self.ahead = deque(each for each in self.ahead if each.origin is not origin)
        self._moves, self._sure = 0, True
        if origin.batch is not None:
            origin.batch.closed = True

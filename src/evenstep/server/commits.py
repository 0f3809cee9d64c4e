"""Turns pushes into commits, and commits into answers, on shard 0."""

from typing import TYPE_CHECKING, Any, cast, final

from evenstep.core.coordinate import Answer, Apply, PushKey
from evenstep.core.errors import ProtocolError
from evenstep.core.sync.rate import clip_factor, commit_step, look_ahead
from evenstep.protocol.messages import Grant, PushGradients
from evenstep.protocol.shard_messages import ShardCommit
from evenstep.server.shard_state import ShardState
from evenstep.tensors.optimizers import LOOKS_AHEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenstep.protocol.optimizer import Options


@final
class Commits:
    """Announced pushes, and the latest commits."""

    def __init__(self, shard_state: ShardState) -> None:
        self._shard_state = shard_state
        self._given: dict[int, tuple[int, Sequence[Options]]] = {}
        """By worker: the incarnation that last sent its optimizers' options, and the options."""
        self._pushes: dict[PushKey, tuple[Sequence[Options], float]] = {}
        """The options and the norm that came with each push."""
        self._made: dict[int, Apply] = {}
        """The commit of each worker's last push."""
        self._options: Sequence[Options] = ()
        """The options that came with the first push of the latest commit."""

    def announce(self, key: PushKey, push: PushGradients) -> None:
        """Note a push that is staged on every shard.

        Raises:
            ConfigError: The optimizers of this run do not take its options.
            ProtocolError: A worker's first push has none.
        """
        worker, incarnation, _ = key
        if push.options is not None:
            self._shard_state.shard.check_options(push.options)
            self._given[worker] = incarnation, push.options
        given_by, options = self._given.get(worker, (None, ()))
        if given_by != incarnation:
            raise ProtocolError("a worker's first push has no options")
        if push.samples:
            self._pushes[key] = options, push.norm

    def forget(self, key: PushKey) -> None:
        """Forget a push that will not be committed."""
        self._pushes.pop(key, None)

    def announced(self, worker: int, incarnation: int) -> tuple[PushKey, ...]:
        """Return the pushes of a worker that can still be committed."""
        return tuple(key for key in self._pushes if key[:2] == (worker, incarnation))

    def make(self, update: Apply) -> ShardCommit:
        """Make the command that commits this update on every shard."""
        served = self._served
        given, norm = self._pushes[update.pushes[0][0]]
        self._options = given
        steps = [
            commit_step(each, share=update.share, behind=update.behind, commits=update.staleness, rule=served.rate)
            for each in given
        ]
        clip = 1.0
        if served.clip is not None:  # The limit of the norm over all shards.
            if len(update.pushes) > 1:
                norm = self._shard_state.squared_norm(update.pushes) ** 0.5
            clip = clip_factor(norm, served.clip)
        for key, _ in update.pushes:
            self.forget(key)
            self._made[key[0]] = update
        return ShardCommit(
            pushes=update.pushes,
            options=tuple(cast("Options", step.options) for step in steps),
            factors=tuple(step.gradient_factor * clip for step in steps),
            compensation=tuple(step.compensation for step in steps),
            direct=tuple(step.direct for step in steps),
        )

    def answer(self, answer: Answer, sizes: tuple[int, ...] | None) -> tuple[Grant, tuple[float, ...]]:
        """Make a worker's message, and return it and how far to move each group's weights. `sizes`: if they changed."""
        release, commit = answer.release, self._made.pop(answer.worker, None)
        work = Grant(
            claims=tuple((claim.number, claim.ranges) for claim in answer.claims),
            over=answer.over,
            lead=None if release is None else release.lead,
            bound=None if release is None else release.bound,
            held=0.0 if release is None else release.held_seconds,
            staleness=None if commit is None else commit.staleness,
            behind=None if commit is None else commit.behind,
            share=None if commit is None else commit.share,
            sizes=sizes,
        )
        # A worker that goes on to evaluate or to save gets the weights as they are.
        spec, rate = cast("Any", self._shard_state.spec), self._served.rate
        if commit is None or answer.whole or not commit.staleness or spec.optimizers[0].name not in LOOKS_AHEAD:
            return work, ()
        # Its next push is assumed to miss as many commits as the last one did.
        share = commit.behind / commit.staleness
        steps = [commit_step(each, share=share, behind=commit.behind, rule=rate) for each in self._options]
        return work, tuple(look_ahead(step.options, commit.staleness, rule=rate) for step in steps)

    @property
    def _served(self) -> Any:  # noqa: ANN401 - a scheme for servers has one
        return cast("Any", self._shard_state.spec).scheme.served

"""How shard 0 turns pushes into commits, and commits into answers."""

from collections.abc import Sequence
from typing import Any, cast, final

from evenstep.core.coordinate import Answer, Apply, PushKey
from evenstep.core.sync.rate import clip_factor, commit_step, look_ahead
from evenstep.protocol.messages import Work
from evenstep.protocol.optimizer import Options
from evenstep.protocol.shard_messages import ShardCommit
from evenstep.server.shard_state import ShardState
from evenstep.tensors.optimizers import LOOKS_AHEAD


@final
class Commits:
    """Announced pushes, and the latest commits."""

    def __init__(self, shard_state: ShardState) -> None:
        self._shard_state = shard_state
        self._pushes: dict[PushKey, tuple[Sequence[Options], float]] = {}
        """The options and the norm that came with each push."""
        self._made: dict[int, Apply] = {}
        """The commit of each worker's last push."""
        self._options: Sequence[Options] = ()
        """The options that came with the first push of the latest commit."""

    def announce(self, key: PushKey, options: Sequence[Options], norm: float) -> None:
        """A push is staged on every shard."""
        self._pushes[key] = options, norm

    def forget(self, key: PushKey) -> None:
        """A push will not be committed."""
        self._pushes.pop(key, None)

    def announced(self, worker: int, incarnation: int) -> tuple[PushKey, ...]:
        """The pushes of a worker that can still be committed."""
        return tuple(key for key in self._pushes if key[:2] == (worker, incarnation))

    def make(self, update: Apply) -> ShardCommit:
        """The command for every shard."""
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

    def answer(self, answer: Answer, sizes: tuple[int, ...] | None) -> tuple[Work, tuple[float, ...]]:
        """The message for a worker, and how far to move each group's weights for it. `sizes`: if they have changed."""
        release, commit = answer.release, self._made.pop(answer.worker, None)
        work = Work(
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
        if commit is None or answer.over or not commit.staleness or spec.optimizers[0].name not in LOOKS_AHEAD:
            return work, ()
        # The commits that its next push misses are taken to be like those that the last one has missed.
        share = commit.behind / commit.staleness
        steps = [commit_step(each, share=share, behind=commit.behind, rule=rate) for each in self._options]
        return work, tuple(look_ahead(step.options, commit.staleness, rule=rate) for step in steps)

    @property
    def _served(self) -> Any:  # noqa: ANN401 - a scheme for servers has one
        return cast("Any", self._shard_state.spec).scheme.served

"""A shard's weights and optimizer state, and the updates on them. Others decide which pushes count, and how much.

It is deterministic and not thread-safe.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ShardLayout
from evenstep.protocol.optimizer import Options, State
from evenstep.server.shard.sums import add_up, moved_on, squared_norm
from evenstep.server.shard.updates import UpdateRule, step_of
from evenstep.tensors.messages import all_finite, as_message, flat_views, parameter_views, zeros


@final
class MessageViews:
    """Views of a message: a vector for each block, and a tensor for each parameter."""

    __slots__ = ("flats", "message", "parameters")

    def __init__(self, layout: ShardLayout, message: torch.Tensor | memoryview) -> None:
        self.message = as_message(layout, message)
        self.flats = flat_views(layout, message)
        self.parameters = parameter_views(layout, message)


Gradients: TypeAlias = Sequence[tuple[torch.Tensor | memoryview | MessageViews, float]]
"""Messages of gradients, in the shard's layout, with their weights. Each occurs once."""


@final
class Shard:
    """The weights, initially zeros, and the optimizers over them.

    Every parameter is one tensor of its own shape, as in one process, so any optimizer is exact that updates each
    parameter from its own gradient and state. A sum of gradients takes the place of the first of them, so an update
    needs no further memory.

    Args:
        layout: The parameters of the shard.
        updates: The run's optimizers, in order. Groups are numbered over all of them, as in the layout.

    Raises:
        ConfigError: The layout has groups that the optimizers lack.
    """

    def __init__(self, layout: ShardLayout, updates: Sequence[UpdateRule]) -> None:
        self.layout: Final = layout
        self._updates = tuple(updates)
        self._groups = sum(len(update.spec.groups) for update in updates)
        if layout.blocks[-1].group >= self._groups:
            raise ConfigError(
                f"the layout has a group {layout.blocks[-1].group}: describe all {self._groups} groups in it"
            )
        self._lie = MessageViews(layout, zeros(layout.nbytes))
        self._parameters = [torch.nn.Parameter(each) for each in self._lie.parameters]
        self._run([{} for _ in self._parameters])

    @property
    def weights(self) -> torch.Tensor:
        """The message that the weights lie in; commits change it."""
        return self._lie.message

    def leave(self, into: "MessageViews | None") -> "MessageViews":
        """Move the weights into another message, a new one if None; return the former, which keeps what it holds."""
        former, self._lie = self._lie, into or MessageViews(self.layout, zeros(self.layout.nbytes))
        self._lie.message.copy_(former.message)
        for parameter, view in zip(self._parameters, self._lie.parameters, strict=True):
            parameter.data = view
        return former

    def initialise(self, weights: torch.Tensor | memoryview) -> None:
        """Copy the weights from a message."""
        self.weights.copy_(as_message(self.layout, weights))

    @torch.no_grad()
    def read_weights(self, into: torch.Tensor | memoryview, ahead: Sequence[float] = ()) -> None:
        """Write the weights into a message.

        `ahead`, one number for each group of the run, moves them along the momentum (`core.sync.rate.look_ahead`).
        """
        if not any(ahead):
            as_message(self.layout, into).copy_(self.weights)
            return
        options, states, views = self.options(), self._states(), parameter_views(self.layout, into)
        for spec, weights, state, out in zip(self.layout.parameters, self._parameters, states, views, strict=True):
            moved_on(weights, state, options[spec.group], ahead[spec.group], out=out)

    def finite(self) -> bool:
        """True if no weight is NaN or infinite. Needs no further memory."""
        return all_finite(self._lie.flats)

    def check_options(self, options: Sequence[Options]) -> None:
        """Check that these options, one mapping for each group of the run, can be set between two commits.

        Raises:
            ConfigError: As for `UpdateRule.check`.
        """
        if len(options) != self._groups:
            raise ConfigError(f"options came for {len(options)} groups: send those of all {self._groups}")
        rest = iter(options)
        for update in self._updates:
            update.check([next(rest) for _ in update.spec.groups])

    def options(self) -> list[Options]:
        """The current options of each group of the run."""
        known = [group for update in self._updates for group in update.spec.groups]
        return [{name: group[name] for name in names} for names, group in zip(known, self._param_groups(), strict=True)]

    @torch.no_grad()
    def commit(
        self,
        gradients: Gradients,
        options: Sequence[Options],
        factors: Sequence[float] = (),
        *,
        stale: torch.Tensor | None = None,
        compensation: Sequence[float] = (),
        direct: Sequence[float] = (),
    ) -> None:
        """Update the weights once, with the weighted sum of the messages times each group's factor.

        Messages are added in order, into the first, which holds the sum afterwards. A message of weight 0 is ignored,
        even if it holds NaNs. If none counts, the weights do not change. The update is computed in the dtype of the
        weights, as torch does on a worker, but half-precision messages are summed in float32 and rounded once.

        Args:
            gradients: Messages and weights.
            options: One mapping for each group of the run. Options that are not named stay.
            factors: One number, at least 0, for each group of the run; empty for 1.
            stale: The weights that the gradients were computed on, a message; None if they are the current ones.
            compensation: One number for each group of the run, which corrects for the weights' change since then
                (`core.sync.rate.RatedStep`); empty for none.
            direct: One number for each group of the run: how far the weights move by the sum itself, before the
                optimizer's step; empty for 0.

        Raises:
            ConfigError: As for `check_options`; nothing has changed then.
        """
        messages = self._counted(gradients)
        self._set_options(options)
        if not messages:
            return
        total = messages[0][0]
        correct = self._compensate(stale, compensation) if stale is not None and any(compensation) else None
        add_up(self.layout, [(each.flats, weight) for each, weight in messages], total.flats, factors, correct)
        if any(direct):
            for block, weights, flat in zip(self.layout.blocks, self._lie.flats, total.flats, strict=True):
                weights.add_(flat, alpha=-direct[block.group])
        self._step(total.parameters)

    def squared_norm(self, gradients: Gradients) -> float:
        """Return the squared norm of the weighted sum of the messages; see `sums.squared_norm`."""
        messages = self._counted(gradients)
        return squared_norm(self.layout, [(each.flats, weight) for each, weight in messages]) if messages else 0.0

    def optimizer_state(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield a copy of the state of each parameter by name, as torch has it.

        Parameters without a state, before the first update, are left out.
        """
        for spec, state in zip(self.layout.parameters, self._states(), strict=True):
            if state:
                yield spec.name, {key: _copied(value) for key, value in state.items()}

    def load_optimizer_state(self, states: Mapping[str, State]) -> None:
        """Continue from states by parameter name, as torch has them.

        Parameters without a state start new. States of other parameters are ignored.

        Raises:
            ConfigError: An optimizer could not continue from a state; nothing has changed then.
        """
        groups = [(update, number) for update in self._updates for number in range(len(update.spec.groups))]
        checked: list[State] = []
        for spec, parameter in zip(self.layout.parameters, self._parameters, strict=True):
            given = {key: value for key, value in states.get(spec.name, {}).items() if value is not None}
            update, group = groups[spec.group]
            checked.append(update.checked_state(group, spec.name, parameter, given) if given else {})
        self._run(checked, self.options())

    def state_dict(self) -> dict[str, object]:
        """For `torch.save`, and `torch.load` with `weights_only`. The tensors are the shard's: save before a commit."""
        return {
            "layout": self.layout.fingerprint,
            "weights": self.weights,
            "states": [dict(state) for state in self._states()],
            "options": self.options(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state. Its optimizer state becomes the shard's own.

        Raises:
            ConfigError: It belongs to a shard with other parameters.
        """
        if state["layout"] != self.layout.fingerprint:
            raise ConfigError("the snapshot is of other parameters than this shard's: resume with the same model")
        self._run(cast("list[State]", state["states"]), cast("list[Options]", state["options"]))
        self.initialise(cast("torch.Tensor", state["weights"]))

    def _run(self, states: Sequence[State], options: Sequence[Options] = ()) -> None:
        """Run new optimizers, which continue from a state for each parameter, with these options or the described ones.

        Tensors of the states become the optimizers' own. With an empty state a parameter starts new.
        """
        groups: list[list[torch.Tensor]] = [[] for _ in range(self._groups)]
        for spec, parameter in zip(self.layout.parameters, self._parameters, strict=True):
            groups[spec.group].append(parameter)
        rest = iter(groups)
        built = [update.build([next(rest) for _ in update.spec.groups]) for update in self._updates]
        optimizers = [optimizer for optimizer in built for _ in optimizer.param_groups]
        for spec, parameter, state in zip(self.layout.parameters, self._parameters, states, strict=True):
            if state:  # Not by load_state_dict, which changes the dtype of some entries.
                optimizers[spec.group].state[parameter] = dict(state)
        self._optimizers = built
        self._steps = [step_of(optimizer) for optimizer in built]
        self._options: list[Options] = []
        if options:
            self._set_options(options)

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _set_options(self, options: Sequence[Options]) -> None:
        if list(options) == self._options:
            return
        self.check_options(options)
        for group, given in zip(self._param_groups(), options, strict=True):
            group.update(given)
        self._options = list(options)

    def _states(self) -> list[State]:
        """Return the optimizer's own state of each parameter: empty before the first update for most optimizers."""
        known = {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}
        return [cast("State", known.get(parameter, {})) for parameter in self._parameters]

    def _counted(self, gradients: Gradients) -> list[tuple[MessageViews, float]]:
        return [
            (message if isinstance(message, MessageViews) else MessageViews(self.layout, message), weight)
            for message, weight in gradients
            if weight
        ]

    def _compensate(
        self, stale: torch.Tensor, compensation: Sequence[float]
    ) -> Callable[[torch.Tensor, int, slice], None]:
        then = flat_views(self.layout, stale)

        def correct(total: torch.Tensor, block: int, own: slice) -> None:
            value = compensation[self.layout.blocks[block].group]
            if value:
                moved = torch.sub(self._lie.flats[block][own].to(total.dtype), then[block][own].to(total.dtype))
                total.addcmul_(total.abs(), moved, value=value)

        return correct

    def _step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update all parameters. The gradients are not kept."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            for step in self._steps:
                step()
        finally:
            for parameter in self._parameters:
                parameter.grad = None


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value

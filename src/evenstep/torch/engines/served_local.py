"""The server engine of local steps: a worker trains alone for a period, and then pushes the change of its model."""

from typing import Any, Final, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.optimizer import OptimizerSpec, Options
from evenstep.schemes import Outer
from evenstep.torch.engines.averages import clean_state, parameters_of
from evenstep.torch.engines.engine import counted_units
from evenstep.torch.engines.served import ServedEngine
from evenstep.worker.hand_outs import HandedOut


@final
class OuterOptimizer:
    """The worker's side of the outer optimizer: its options. The servers have its state."""

    def __init__(self, outer: Outer, *, groups: int) -> None:
        common: dict[str, Any] = {"lr": outer.rate, "momentum": outer.momentum}
        if outer.delayed:
            name, options = "DelayedNesterov", {**common, "share": 1.0}
        else:
            rest = {"dampening": 0.0, "weight_decay": 0.0, "nesterov": bool(outer.momentum), "maximize": False}
            name, options = "SGD", {**common, **rest}
        self.spec: Final = OptimizerSpec(name=name, groups=(options,) * groups)

    def options(self) -> tuple[Options, ...]:
        """The options of each param group, which stay."""
        return self.spec.groups

    def hand_over(self) -> None:
        """Do nothing: the state of the script's optimizer stays here."""

    def clear(self) -> None:
        """Do nothing, likewise."""


@final
class LocalServedEngine(ServedEngine):
    """Steps the script's own optimizer on each batch of a claim, which is a period, and pushes the model's change.

    The push takes place when the script asks for the next batch, after its optimizer has stepped, and the worker goes
    on from the servers' weights.
    """

    def enter_loader(self) -> None:
        now = self.hand_outs.in_hand
        finished = now is None or now.finished
        if now is not None and finished:
            self._end_batch(now)
        newest = self.hand_outs.ahead[-1] if self.hand_outs.ahead else now
        if self._in_step and newest is not None and newest.piece.last and newest.claimed in self._pass.held:
            raise ConfigError(
                "a batch was fetched before the step on the last one of a period, whose push this worker's group waits"
                " for: step on each batch before the next is fetched, or use asp, ssp or dssp"
            )
        self.tracker.enter_loader(ended=finished)
        self._pass.record()

    def batch_ends(self) -> None:
        now = self.hand_outs.in_hand
        if now is not None:
            self._end_batch(now)
        super().batch_ends()

    def begin(self, batch: HandedOut) -> None:
        self._counted.append(batch)
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)

    def leave_loop(self) -> None:
        if (batch := self.hand_outs.in_hand) is not None and batch.closed:
            self._end_batch(batch)  # The loop was left where a period had ended.
        now = self.tracker.iteration
        if now is not None and now.paused is None and not (self._pass.ended and self._pass.held):
            self.tracker.compute_ends()  # The steps of a period that was left are lost.
        super().leave_loop()

    @property
    def synchronises(self) -> bool:
        return self._pass.over or super().synchronises  # No worker waits for one that has left its period.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._step_alone(optimizer)

    def after_step(self, *_: Any) -> None:
        """Called after a step, as a hook: push after the last batch, if the loop ended before it was computed."""
        now = self.hand_outs.in_hand
        if self._loop_over and not self.hand_outs.ahead and now is not None and now.piece.last:
            self.batch_ends()
            if self._pass.ended and not self._pass.held:
                self._pass.end()

    def _end_batch(self, now: HandedOut) -> None:
        """After the last batch of a period, push the change of the model since its weights were pulled."""
        iteration = self.tracker.iteration
        if not now.piece.last or iteration is None or iteration.paused is not None:
            return
        if now.open and not now.closed:
            self._left_open = now
        self._require_served()
        counted = tuple(each for each in self._counted if each.computed)
        self.tracker.compute_ends()
        self._counted.clear()
        if self._pass.forfeited(now.claimed):
            self._parameters.take_weights()  # Other workers have the samples, so the steps are in vain.
            return
        samples = sum(each.piece.samples for each in counted) if any(each.closed for each in counted) else 0
        if not samples:
            self._parameters.drop_changes()
        put = self._parameters.put_changes if samples else float
        if not self._pass.push(iteration, now.claimed, put, samples=samples, units=counted_units(counted)):
            clean_state([self._optimizer])

    def _require_served(self) -> None:
        """Check that the servers have all parameters that the script's optimizer steps.

        Raises:
            ConfigError: It steps others, of which each worker would have its own.
        """
        given = parameters_of([self._optimizer])
        others = [each for each in given if each.requires_grad and not self._parameters.has(each)]
        if others:
            raise ConfigError(
                f"the optimizer steps on {len(others)} parameters that required no gradient at prepare or came later,"
                f" such as one of shape {list(others[0].shape)}, and servers keep those of then: unfreeze parameters"
                " and add param groups before prepare"
            )

"""Batches that are copies of another worker's sample, where each worker steps on its own gradients."""

from collections.abc import Sequence
from typing import final

import torch

from evenstep.worker.hand_outs import HandedOut


@final
class CopiedGradients:
    """Keeps what a backward on a copy adds out of the gradients, in which earlier batches may wait for a step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._before: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

    def keep_out(self) -> None:
        """Called in a backward, any number of times: after it the gradients are those of before."""
        if self._before:
            return
        self._before = [(each, each.grad) for model in self._models for each in model.parameters()]
        for parameter, _ in self._before:
            parameter.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(self._put_back)

    def step_begins(self, batch: HandedOut) -> None:
        """Drop the gradients if this batch is a copy whose backward was not noticed."""
        if not (batch.piece.samples or batch.backward):
            for model in self._models:
                model.zero_grad()

    def _put_back(self) -> None:
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

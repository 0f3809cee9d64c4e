"""Compares the workers' replicas of the models: a script may change weights or gradients on one worker alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, final

import numpy as np
import torch

from evenstep.core.replicas import Looks, require_same_weights
from evenstep.torch.processes.workers import Workers, of_all

_PIECE: Final = 2**18
"""The elements that are copied to float64 at a time."""


@final
class Replicas:
    """This worker's replicas, whose weights are to be those of the other workers.

    Attributes:
        looks: Says when to compare them; all workers must ask it in the same iterations.
    """

    def __init__(self, models: Sequence[torch.nn.Module], workers: Workers) -> None:
        self.looks = Looks()
        self._workers = workers
        self._parameters = {
            (f"model {number}: " if len(models) > 1 else "") + name: parameter
            for number, model in enumerate(models)
            for name, parameter in model.named_parameters()
            # A shard of a DTensor has another part of the weights on each worker.
            if not hasattr(parameter, "device_mesh")
            and name not in getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        }

    def compare(self, meeting: AbstractContextManager[None]) -> None:
        """Compare the weights; all workers must call it together, and wait for each other in `meeting`.

        Raises:
            DisagreementError: They differ by more than rounding explains.
        """
        if not self._parameters:
            return
        mine = torch.stack([_sketch(each.detach()).cpu() for each in self._parameters.values()])
        with meeting:
            told = of_all(self._workers, mine)
        rounding = [
            torch.finfo(each.dtype).eps if each.is_floating_point() else 0.0 for each in self._parameters.values()
        ]
        require_same_weights(told.numpy(), np.array(rounding), list(self._parameters))


def _sketch(weights: torch.Tensor) -> torch.Tensor:
    """A sum of all elements, with factors by which differences do not cancel out, and the norm."""
    values = torch.view_as_real(weights.resolve_conj()) if weights.is_complex() else weights
    flat = values.flatten()
    factors = torch.arange(1, min(flat.numel(), _PIECE) + 1, dtype=torch.float64, device=flat.device).sin()
    # In float64, since a product in float32 may be rounded to ten bits on some of the workers' devices (TF32).
    sums = torch.stack([piece.double() @ factors[: piece.numel()] for piece in torch.split(flat, _PIECE)])
    turns = torch.arange(1, sums.numel() + 1, dtype=torch.float64, device=flat.device)
    norm = flat.to(torch.promote_types(flat.dtype, torch.float32)).norm()
    return torch.stack([sums @ turns.cos(), norm.double()])

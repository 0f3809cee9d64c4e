"""Sketches of the weights of PyTorch models, by which workers compare their replicas."""

from collections.abc import Sequence

import torch

from evenstep.core.replicas import Sketch
from evenstep.worker.replicas import PIECE, sketch


def sketches_of(models: Sequence[torch.nn.Module]) -> dict[str, Sketch]:
    """Return the sketches of the parameters that all workers must have alike, by name."""
    return {
        (f"model {number}: " if len(models) > 1 else "") + name: _sketch(parameter.detach())
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        # A shard of a DTensor has another part of the weights on each worker.
        if not hasattr(parameter, "device_mesh") and name not in getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    }


def _sketch(weights: torch.Tensor) -> Sketch:
    flat = (torch.view_as_real(weights.resolve_conj()) if weights.is_complex() else weights).flatten()
    rounding = torch.finfo(weights.dtype).eps if weights.dtype.is_floating_point else 0.0
    factors = torch.arange(1, min(flat.numel(), PIECE) + 1, dtype=torch.float64, device=flat.device).sin()
    return sketch(map(torch.Tensor.double, torch.split(flat, PIECE)), factors, rounding)

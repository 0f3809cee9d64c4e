"""The factors of a worker whose model is in PyTorch."""

from collections.abc import Callable

import torch

from evenstep.worker.factors import FactorSampler, factor_sampler


def sampler_of(device: torch.device, clock: Callable[[], float]) -> FactorSampler:
    """The sampler for a worker that computes on this device; `clock` returns seconds that only rise.

    On the CPU as many threads compute as PyTorch uses, and one for a model on a GPU.
    """
    if device.type != "cuda":
        return factor_sampler(clock, threads=torch.get_num_threads())
    return factor_sampler(clock, threads=1, gpu=f"GPU-{torch.cuda.get_device_properties(device).uuid}")

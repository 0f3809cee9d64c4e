"""A model whose gradients are summed over the workers."""

from dataclasses import dataclass
from typing import Self, final

import torch

from evenstep.torch.engines.gradient_watch import GradientWatch
from evenstep.torch.engines.running_statistics import RunningStatistics
from evenstep.torch.engines.weighting import GradientWeight
from evenstep.torch.processes.workers import Workers


@final
@dataclass(frozen=True, slots=True)
class SummedModel:
    """One model's weight and, if there are several workers, its watch and its BatchNorm statistics."""

    weight: GradientWeight
    watch: GradientWatch | None = None
    statistics: RunningStatistics | None = None

    @classmethod
    def of(cls, model: torch.nn.Module, workers: Workers) -> Self:
        weight = GradientWeight(model.parameters())
        if workers.count == 1:
            return cls(weight)
        statistics = RunningStatistics(model, workers)
        return cls(weight, GradientWatch(model), statistics if statistics.norms else None)

    def close(self) -> None:
        """Remove the hooks."""
        self.weight.close()
        if self.watch is not None:
            self.watch.close()

    def summed(self) -> None:
        """The gradients are on their way to all workers."""
        self.weight.accumulating = False
        self.weight.leave()
        if self.watch is not None:
            self.watch.reduced()

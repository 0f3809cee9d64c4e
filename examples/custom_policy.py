"""A custom expert and two custom policies, each a class that a scheme string can name.

    cd examples
    evenstep run --workers 2 --slow 1=4x --scheme custom_policy:periodic:period=20 custom_policy.py
    evenstep run --workers 2 --slow 1=4x custom_policy.py --object
    evenstep run --workers 2 --slow 1=4x --scheme custom_policy:by_last_time custom_policy.py
    evenstep run --workers 2 --slow 1=4x --scheme custom_policy:warm_up:iterations=4,bound=2 custom_policy.py
    evenstep simulate clusters/four-gpus.toml --global-batch-size 512 --schemes bsp custom_policy:by_last_time

docs/custom-policies.md explains them. evenstep finds the module in the current directory or on PYTHONPATH.
"""

import argparse
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch

import evenstep
from evenstep import policies


# How fast will each worker be? As fast as it was a period ago: something slows it at regular times.
@policies.recipe
@dataclass
class Periodic(policies.Expert):
    """lb-bsp with one more expert; of several, those count that would have gained most."""

    workers: int
    period: Annotated[int, "Iterations after which slowness returns; 1 or more."] = 20
    paces: npt.NDArray[np.float64] = field(init=False)  # Checkpoints hold the fields with `init=False`.
    now: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.period < 1:
            raise evenstep.ConfigError(f"slowness cannot return every {self.period} iterations: use 1 or more")
        self.paces = np.zeros((self.period, self.workers))

    def observe(
        self, reports: policies.Reports, paces: npt.NDArray[np.float64], measured: npt.NDArray[np.bool_]
    ) -> None:
        self.paces[self.now % self.period] = np.where(measured, paces, self.paces[(self.now - 1) % self.period])
        self.now += 1

    def speeds(self) -> npt.NDArray[np.float64]:
        ago = self.paces[self.now % self.period]
        return 1.0 / np.where(ago > 0, ago, self.paces[(self.now - 1) % self.period])


# How much does each worker compute? In proportion to its speed in its last iteration.
@policies.recipe
@dataclass
class ByLastTime(policies.LoadPolicy):
    """Sizes in proportion to samples per second.

    Every worker runs its own copy. They agree because they see the same integers and calculate in integers.
    """

    workers: int
    keep: Annotated[float, "How much of the old speed remains at each iteration; 0 or more, less than 1."] = 0.5
    speeds: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise evenstep.ConfigError(f"a part of {self.keep} of a speed cannot remain: use 0 <= keep < 1")
        self.speeds = np.zeros(self.workers, dtype=np.int64)

    def observe(self, reports: policies.Reports) -> None:
        known = (reports.samples > 0) & (reports.compute_microseconds > 0)
        new = reports.samples * 10**9 // np.maximum(reports.compute_microseconds, 1)  # In samples per 1000 seconds.
        percent = round(100 * self.keep)
        before = np.where(self.speeds == 0, new.sum() // self.workers, self.speeds)  # Equal speeds at first.
        self.speeds = np.where(known, (percent * before + (100 - percent) * new) // 100, self.speeds)

    def allocate(self, problem: policies.Problem) -> policies.Allocation:
        speeds = self.speeds if self.speeds.all() else np.ones_like(self.speeds)
        return policies.Allocation(sizes=policies.shares_of(problem, speeds))  # The sum is exact, and limits are kept.


# How far ahead may a worker run? In step at first, then up to a bound.
@policies.recipe
@dataclass
class WarmUp(policies.SyncPolicy):
    """SSP that begins in step, so that the first, large updates are not stale.

    No worker leads by more than 0 in the slowest worker's first iterations, and by more than `bound` after them.
    """

    workers: int
    iterations: Annotated[int, "How many iterations workers stay in step; 0 or more."] = 10
    bound: Annotated[int, "The largest lead after that; 0 or more."] = 3
    roster: policies.Roster = field(init=False, default_factory=policies.Roster)  # The running and the held workers.

    @property
    def allowed(self) -> int:
        return 0 if self.roster.slowest < self.iterations else self.bound

    def on_join(self, worker: int, now: float) -> list[policies.Command]:
        return [self.roster.join(worker, now, bound=self.allowed)]

    def on_push(self, push: policies.Push, now: float) -> list[policies.Command]:
        self.roster.push(push, now)
        self.roster.hold(push.worker)
        return [*policies.commit_alone(push), *self.roster.release_up_to(self.allowed, now, bound=self.allowed)]

    def on_leave(self, worker: int, now: float) -> list[policies.Command]:
        self.roster.leave(worker)
        return [*self.roster.release_up_to(self.allowed, now, bound=self.allowed)]

    def waited_for(self) -> list[int]:
        return self.roster.waited_for()


def main() -> None:
    """Train a small network on random data, under the scheme of `evenstep run`, or under an object with --object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--object", action="store_true", help="pass the scheme to prepare as an object")
    options = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(80_000, 16)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1, keepdim=True) / 4).sin())
    loader = torch.utils.data.DataLoader(data, batch_size=1000, shuffle=True)
    layers = [torch.nn.Linear(16, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # An argument of prepare comes before the command line; None leaves the choice to that.
    scheme = policies.scheme_of(ByLastTime, keep=0.8) if options.object else None
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme)
    for epoch in range(options.epochs):
        losses = []
        for features, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: {len(losses)} iterations, loss {sum(losses) / max(len(losses), 1):.3f}")


if __name__ == "__main__":
    main()

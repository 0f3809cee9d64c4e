"""Optimizers of a user: some that servers can run, and some that they must refuse."""

import torch


class Signs(torch.optim.Optimizer):
    """Element-wise: the sign of a mean of gradients, as in Lion."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    update = self.update(parameter, mean * group["betas"][0] + parameter.grad, state, group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                    mean.mul_(group["betas"][1]).add_(parameter.grad, alpha=1 - group["betas"][1])

    def update(self, parameter, direction, state, group):
        return direction.sign()


class ByNorm(Signs):
    """A part's norm is not the whole's."""

    def update(self, parameter, direction, state, group):
        return direction / direction.norm()


class ByRow(Signs):
    def update(self, parameter, direction, state, group):
        if direction.ndim != 2:
            return direction
        rows = state.setdefault("rows", torch.zeros(len(direction)))
        return direction + rows[:, None]


class Lists(Signs):
    def update(self, parameter, direction, state, group):
        state.setdefault("means", []).append(float(direction.mean()))
        return direction


class Noisy(Signs):
    def update(self, parameter, direction, state, group):
        return direction + torch.randn_like(direction)


class CountsInItself(Signs):
    steps = 0

    def update(self, parameter, direction, state, group):
        self.steps += 1
        return direction / self.steps


class CountsInItsGroup(Signs):
    def update(self, parameter, direction, state, group):
        group["weight_decay"] += 0.01
        return direction


class KeepsMemory(Signs):
    """It writes to where each parameter lay at first."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr, betas, weight_decay)
        self.first = {}

    def update(self, parameter, direction, state, group):
        self.first.setdefault(parameter, parameter.data).sub_(direction.sign(), alpha=group["lr"])
        return torch.zeros_like(parameter)


class WithoutRate(Signs):
    def update(self, parameter, direction, state, group):
        return direction.sign() / group["lr"] * 0.01


class HidesAnArgument(Signs):
    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, gamma=1.0):
        super().__init__(params, lr, betas, weight_decay)
        self.gamma = gamma


class NeedsAClosure(Signs):
    def step(self, closure):
        return closure()


class Centralises(Signs):
    """Gradients of convolutions alone are centralised, as in Ranger."""

    def update(self, parameter, direction, state, group):
        return direction - direction.mean((1, 2, 3), keepdim=True) if direction.ndim == 4 else direction


class LimitsTheWhole(Signs):
    """The gradients of all parameters have a norm of at most 1 together."""

    def update(self, parameter, direction, state, group):
        each = (other.grad for group in self.param_groups for other in group["params"] if other.grad is not None)
        return direction / max(1.0, float(torch.stack([gradient.norm() for gradient in each]).norm()))


class DecaysMatrices(Signs):
    def update(self, parameter, direction, state, group):
        return direction + 0.1 * parameter if parameter.ndim > 1 else direction


class TrainsWhatRequiresIt(Signs):
    def update(self, parameter, direction, state, group):
        return direction if parameter.requires_grad else torch.zeros_like(direction)

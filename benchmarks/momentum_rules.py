"""How SGD with momentum 0.9 should take stale commits: rules compared by time to accuracy and at equal samples.

As in time_to_accuracy.py: real gradients in virtual time, each rule at its own best rate on held-out data and other
seeds. Beside it stands the accuracy at equal samples with the rate that is best for `bsp`, and with twice it.
"""

import sys
import time
from functools import partial
from statistics import fmean, geometric_mean
from typing import NamedTuple

import torch
from harness import record, side_by_side
from time_to_accuracy import BASELINE, EPOCH, MOMENTUM, NESTEROV, TASKS, Bench, Kind, final, grid, ratio

MU = 0.9
OURS, BEFORE = "momentum by samples", "momentum by commits (0.2.0)"
REGIMES = ("persistent", "episodic", "jitter")
SCHEMES = ("asp", "dssp:load=lb-bsp", "grouped:groups=4,inside=lb-bsp")
PLAIN = {
    MOMENTUM: partial(side_by_side.sgd, momentum=MU),
    NESTEROV: partial(side_by_side.sgd, momentum=MU, nesterov=True),
}
"""What a barrier trains with."""


class Rule:
    """SGD with momentum on a server. Subclasses say how it takes a commit, and which weights it gives out."""

    def __init__(self, rates):
        self.rates, self.buffer = torch.tensor(rates)[:, None], None

    def given(self, weights, event):
        return weights

    def keep(self, gradient, momentum):
        self.buffer = gradient if self.buffer is None else momentum * self.buffer + gradient


def compensated(gradient, weights, computed_on, part=3.0):
    """DC-ASGD."""
    return gradient + part * gradient.abs() * (weights - computed_on)


def sum_of_powers(count):
    return (1 - MU**count) / (1 - MU)


class ByCommits(Rule):
    """0.2.0: momentum counts commits; its gain is cut by staleness; workers look ahead (DANA); DC-ASGD."""

    def given(self, weights, event):
        if self.buffer is None:
            return weights
        return weights - MU * sum_of_powers(event.stale) * self.rates * self.buffer

    def commit(self, weights, gradient, computed_on, event):
        factor = event.share / (1 + 0.3 * event.behind * (1 / (1 - MU) - 1))
        part = min(1.0, event.share * event.stale / event.behind) if event.stale else 1.0
        self.keep(factor * compensated(gradient, weights, computed_on), MU**part)
        return weights - sum_of_powers(part) * self.rates * self.buffer


class BySamples(Rule):
    """Ours, and what it becomes without each of its parts."""

    def __init__(self, rates, *, direct=True, ahead=True, compensation=3.0, damped=1.0):
        super().__init__(rates)
        self.direct, self.ahead, self.compensation, self.damped = direct, ahead, compensation, damped
        self.carried = MU if direct else 1.0

    def given(self, weights, event):
        if self.buffer is None or not self.ahead:
            return weights
        return weights - self.carried * sum_of_powers(event.behind) * self.rates * self.buffer

    def commit(self, weights, gradient, computed_on, event):
        gradient = compensated(gradient, weights, computed_on, self.compensation)
        gradient = event.share / (1 + self.damped * MU * event.behind) * gradient
        self.keep(gradient, MU**event.share)
        step = self.carried * sum_of_powers(event.share) * self.buffer
        return weights - self.rates * (step + gradient if self.direct else step)


class Delayed(Rule):
    """Delayed Nesterov (Liu et al., 2024): each gradient moves the weights at once, momentum once per global batch."""

    def __init__(self, rates):
        super().__init__(rates)
        self.sum, self.done = 0.0, 0.0

    def commit(self, weights, gradient, computed_on, event):
        gradient = event.share * gradient
        self.sum, self.done = self.sum + gradient, self.done + event.share
        weights = weights - self.rates * gradient
        if self.done >= 1 - 1e-9:
            self.keep(self.sum, MU)
            self.sum, self.done = 0.0, self.done - 1
            weights = weights - self.rates * MU * self.buffer
        return weights


class Implicit(Rule):
    """Explicit momentum less the implicit one, 1 - 1/(n+1) at a staleness of n (Mitliagkas et al., 2016)."""

    def __init__(self, rates):
        super().__init__(rates)
        self.momentum = 0.0

    def commit(self, weights, gradient, computed_on, event):
        self.momentum = max(0.0, MU - (1 - 1 / (event.stale + 1)))
        self.keep(event.share * gradient, self.momentum)
        return weights - self.rates * (1 - self.momentum) / (1 - MU) * self.buffer


class GapAware(Rule):
    """Elements are divided by 1 + |w - v| over the mean displacement per global batch (Barkai et al., 2019)."""

    def __init__(self, rates):
        super().__init__(rates)
        self.displaced, self.count = 0.0, 0

    def commit(self, weights, gradient, computed_on, event):
        if self.count:
            mean = self.displaced / (1 - 0.999**self.count)
            gradient = gradient / (1 + (weights - computed_on).abs() / mean.clamp_min(1e-12))
        self.keep(event.share * gradient, MU)
        step = self.rates * self.buffer
        self.displaced, self.count = 0.999 * self.displaced + 0.001 * step.abs() / event.share, self.count + 1
        return weights - step


def ours(rates):
    """evenstep.core.sync.rate: Nesterov's step, with a momentum that counts samples."""
    return side_by_side.sgd(rates, MU)


def without_momentum(rates):
    """SGD without momentum, at lr / (1 - mu)."""
    return side_by_side.sgd([rate / (1 - MU) for rate in rates])


class AdamBySamples(side_by_side.Optimizer):
    """Adam whose betas are those of the push's part of the global batch, beta^s, so that moments count samples."""

    def __init__(self, rates):
        super().__init__(rates, betas=(MU, 0.999))

    def given(self, weights, event):
        if self.buffer is None:
            return weights
        return weights - sum_of_powers(event.behind) * self.rates * self._direction(self.latest)

    def commit(self, weights, gradient, computed_on, event):
        self.latest = {"betas": tuple(beta**event.share for beta in self.options["betas"])}
        return weights - event.share * self.rates * self._stepped(gradient, self.latest)


RULES = {
    OURS: ours,
    BEFORE: ByCommits,
    "by samples, heavy ball (nothing at once)": partial(BySamples, direct=False),
    "by samples, no looking ahead": partial(BySamples, ahead=False),
    "by samples, no DC-ASGD": partial(BySamples, compensation=0.0),
    "by samples, undamped": partial(BySamples, damped=0.0),
    "delayed Nesterov": Delayed,
    "momentum less the implicit one": Implicit,
    "gap-aware": GapAware,
    "no momentum, lr / (1 - mu)": without_momentum,
}


class Family(NamedTuple):
    """Rules that are compared with each other: by what a barrier trains with, the first being the baseline."""

    plain: dict
    rules: dict
    grids: dict


FAMILIES = {
    MOMENTUM: Family(PLAIN, RULES, {"digits": grid(0.025, 14), "letters": grid(0.1, 14)}),
    "Adam": Family(
        {"Adam": side_by_side.adam},
        {"betas by commits (as it is)": side_by_side.adam, "betas by samples": AdamBySamples},
        {"digits": grid(0.008, 10), "letters": grid(0.016, 10)},
    ),
}


def main():
    options = record.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows, equal = [], []
    for name in ("digits",) if options.quick else ("digits", "letters"):
        for kind, family in FAMILIES.items():
            _compare(name, kind, family, options, rows, equal)
    done = record.publish(
        "momentum_rules",
        "Rules for stale commits of SGD with momentum 0.9, and of Adam, real gradients in virtual time",
        options,
        config={
            "momentum": MU, "schemes": SCHEMES, "epoch_global_batches": EPOCH,
            "grids": {kind: family.grids for kind, family in FAMILIES.items()},
            "targets": {name: TASKS[name].target for name in ("digits", "letters")},
            "rules": {
                name: (make.func if isinstance(make, partial) else make).__doc__
                for family in FAMILIES.values()
                for name, make in family.rules.items()
            },
            "tuned": "by time to the target on held-out fifths of the training data, with other seeds",
            "at equal samples": f"with the rate that is best for {BASELINE}, and with twice it",
        },
        figures=_figures(rows, equal),
        tables=[
            table
            for kind in FAMILIES
            for table in (_times(rows, kind), *(_accuracies(equal, kind, times) for times in (1, 2)))
        ],
        raw={"rows": rows, "equal_samples": equal},
    )  # fmt: skip
    return 0 if done else 1


def _compare(name, kind, family, options, rows, equal):
    """Adds to the rows those of a task: tuned ones, and at equal rates. Their `optimizer` is the family."""
    plain, rules = (
        Bench(name, options, {rule: Kind(make, family.grids) for rule, make in makes.items()})
        for makes in (family.plain, family.rules)
    )
    for regime in REGIMES[1:2] if options.quick else REGIMES:
        began = time.monotonic()
        barrier = plain.cell(regime, BASELINE)
        rate = barrier[0]["rate"]
        equal += _equal(plain, kind, regime, BASELINE, rate)
        cells = barrier
        for scheme in SCHEMES[:1] if options.quick else SCHEMES:
            cells = cells + rules.cell(regime, scheme)
            equal += _equal(rules, kind, regime, scheme, rate)
        rows += [{**row, "rule": row["optimizer"], "optimizer": kind} for row in cells]
        record.console.print(f"  {name}, {kind}, {regime}: {time.monotonic() - began:.0f} s")


def _equal(bench, kind, regime, scheme, rate):
    """Final accuracies of all rules at a given rate and at twice it, by seed."""
    by_seed = [
        bench.curves(regime, scheme, seed, {rule: [rate, 2 * rate] for rule in bench.kinds}, bench.task)
        for seed in bench.seeds
    ]
    return [
        {"task": bench.name, "regime": regime, "scheme": scheme, "optimizer": kind, "rule": rule, "rate": times * rate,
         "times": times, "final": [-final(each[rule][number]) for each in by_seed]}
        for rule in bench.kinds
        for number, times in enumerate((1, 2))
    ]  # fmt: skip


# What is shown.


def _figures(rows, equal):
    figures = []
    for rule in (OURS, BEFORE):
        ratios = [ratio(_comparable(rows), row) for row in rows if row["rule"] == rule]
        name = f"{rule}: seconds to the target over {BASELINE}'s with momentum"
        if None not in ratios:
            figures.append(record.figure(name, ratios, goal="<= 1" if rule == OURS else None))
    gained = [
        fmean(ours["final"]) - fmean(before["final"])
        for ours in equal
        for before in equal
        if (ours["rule"], before["rule"]) == (OURS, BEFORE)
        and all(ours[key] == before[key] for key in ("task", "regime", "scheme", "times"))
    ]
    return [*figures, record.figure(f"points that {OURS} gains at equal samples and rates", gained, goal=">= 0")]


def _comparable(rows):
    """Without the barrier's other optimizer, so that each cell has one baseline."""
    return [row for row in rows if row["rule"] != NESTEROV]


def _times(rows, kind):
    """Over the baseline, by task and regime; the geometric mean over the schemes."""
    here = [row for row in rows if row["optimizer"] == kind]

    def told(each):
        ratios = [ratio(_comparable(rows), row) for row in each]
        return "never" if None in ratios else f"{geometric_mean(ratios):.2f}"

    title = (
        f"{kind}: seconds to the target over those of {BASELINE}, each at its own best rate;"
        f" geometric mean over {', '.join(SCHEMES)}"
    )
    return _by_cell(title, kind, here, told)


def _accuracies(equal, kind, times):
    here = [row for row in equal if (row["optimizer"], row["times"]) == (kind, times)]

    def told(each):
        finals = [fmean(row["final"]) for row in each]
        return f"{fmean(finals):.1f} ({min(finals):.1f})"

    which = "the rate" if times == 1 else "twice the rate"
    title = (
        f"{kind}: accuracy in % at equal samples with {which} that is best for {BASELINE}; mean (lowest) of the schemes"
    )
    return _by_cell(title, kind, here, told)


def _by_cell(title, kind, rows, told):
    """A table of rules by task and regime."""
    cells = list(dict.fromkeys((row["task"], row["regime"]) for row in rows))
    lines = [
        [
            f"{BASELINE}, {rule}" if rule in FAMILIES[kind].plain else rule,
            *(
                told([row for row in rows if (row["rule"], row["task"], row["regime"]) == (rule, *cell)])
                for cell in cells
            ),
        ]
        for rule in dict.fromkeys(row["rule"] for row in rows)
    ]
    return record.table(title, ("rule", *(f"{task}, {regime}" for task, regime in cells)), lines)


if __name__ == "__main__":
    sys.exit(main())

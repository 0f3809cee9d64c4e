"""A load that is told how fast the workers are, so that its sizes do not depend on how busy the machine is."""

from dataclasses import dataclass, replace

import numpy as np

import evenstep
from evenstep.schemes import parse_scheme


def told(scheme, slowdowns, then=None):
    """The scheme, with a load that takes the k-th worker's compute for `slowdowns[k]` ms a sample, whatever it took.

    With `then`, an iteration and other slowdowns, these hold from that iteration on.
    """
    scheme = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    load = Told(load=scheme.load, slowdowns=tuple(slowdowns), then=then, multiple=scheme.load.multiple)
    return replace(scheme, load=load)


@dataclass(frozen=True, kw_only=True)
class Told(evenstep.policies.Load):
    load: evenstep.policies.Load
    slowdowns: tuple[int, ...]
    then: tuple[int, tuple[int, ...]] | None = None

    @property
    def by_epoch(self):
        return self.load.by_epoch

    @property
    def follows_speed(self):
        return self.load.follows_speed

    def policy(self, workers):
        return ToldPolicy(self.load.policy(workers), self.slowdowns, self.then)


class ToldPolicy(evenstep.policies.LoadPolicy):
    def __init__(self, policy, slowdowns, then):
        self.policy, self.slowdowns, self.then = policy, np.array(slowdowns), then
        self.observed = 0

    def observe(self, reports):
        if self.then is not None and self.observed == self.then[0]:
            self.slowdowns = np.array(self.then[1])
        self.observed += 1
        # A report that counts as no measurement stays none.
        self.policy.observe(
            reports._replace(
                compute_microseconds=np.where(
                    reports.compute_microseconds > 0, reports.samples * self.slowdowns * 1000, 0
                )
            )
        )

    def allocate(self, problem):
        return self.policy.allocate(problem)

    def state_dict(self):
        return self.policy.state_dict()

    def load_state_dict(self, state):
        self.policy.load_state_dict(state)

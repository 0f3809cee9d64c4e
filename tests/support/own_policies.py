"""Recipes as a user might write them, most of which are wrong; and workers that train under them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

import evenstep
from evenstep.core.sync.roster import Roster, commit_alone
from support.training import prepared, train, weights

WRONG_SIZES = {
    "sum": lambda problem: problem.maximum * 0 + 2,
    "floats": lambda problem: np.full(problem.workers, problem.global_batch_size / problem.workers),
    "list": lambda problem: [problem.global_batch_size] + [0] * (problem.workers - 1),
    "shape": lambda problem: np.array([problem.global_batch_size], dtype=np.int64),
    "limits": lambda problem: np.array([problem.global_batch_size, 0], dtype=np.int64),
}


@dataclass(frozen=True, kw_only=True)
class WrongLoad(evenstep.policies.Load):
    wrong: str
    after: int = 0

    def policy(self, workers):
        return WrongPolicy(self.wrong, self.after)


class WrongPolicy(evenstep.policies.LoadPolicy):
    """Gives the first worker all but the smallest batches of the others; something wrong after so many iterations."""

    def __init__(self, wrong, after):
        self.wrong, self.left = wrong, after

    def observe(self, reports):
        self.left -= 1

    def allocate(self, problem):
        if self.left > 0:
            sizes = problem.minimum.copy()
            sizes[0] += problem.global_batch_size - sizes.sum()
            return evenstep.policies.Allocation(sizes=sizes)
        if self.wrong == "type":
            return problem.maximum
        return evenstep.policies.Allocation(sizes=WRONG_SIZES[self.wrong](problem))


@dataclass(frozen=True, kw_only=True)
class WrongSync:
    wrong: str
    in_step = False

    def policy(self, workers):
        return [] if self.wrong == "policy" else WrongSyncPolicy(self.wrong)


class WrongSyncPolicy(evenstep.policies.SyncPolicy):
    def __init__(self, wrong):
        self.wrong, self.roster = wrong, Roster()

    def on_join(self, worker, now):
        return [self.roster.join(worker, now, bound=None)]

    def on_push(self, push, now):
        self.roster.push(push, now)
        commit, release = commit_alone(push), self.roster.release(push.worker, now, bound=None)
        return {
            "holds": commit,
            "twice": [*commit, *commit, release],
            "releases": [*commit, release, release],
            "none": None,
            "words": [*commit, "release"],
        }[self.wrong]

    def on_leave(self, worker, now):
        self.roster.leave(worker)
        return []

    def waited_for(self):
        return []


@evenstep.policies.recipe
def wrong_sizes(*, wrong: str = "sum", after: int = 0, servers: int = 0) -> evenstep.Scheme:
    load = WrongLoad(wrong=wrong, after=after)
    return evenstep.Scheme(load=load, served=evenstep.schemes.Served(servers=servers) if servers else None)


@evenstep.policies.recipe
def wrong_sync(*, wrong: Literal["holds", "twice", "releases", "none", "words", "policy"] = "holds") -> evenstep.Scheme:
    return evenstep.Scheme(
        load=evenstep.schemes.bsp().load, sync=WrongSync(wrong=wrong), served=evenstep.schemes.Served()
    )


@evenstep.policies.recipe
def wrong_parts(*, part: str = "load") -> evenstep.Scheme:
    if part == "scheme":
        return "bsp"
    parts = {"load": evenstep.schemes.bsp().load, part: part}
    return evenstep.Scheme(**parts, served=evenstep.schemes.Served())


def train_under(schemes, run):
    """What a training under each scheme, by name, comes to on this worker, or its error and the weights until then."""
    found = {}
    for name, scheme in schemes.items():
        run.scheme = scheme
        try:
            found[name] = train(run)
        except evenstep.ConfigError as error:
            found[name] = str(error)
    return found


def fail_later(run, after):
    """The weights before and after the iteration in which the policy goes wrong, and the error."""
    run.scheme = evenstep.Scheme(load=WrongLoad(wrong="sum", after=after))
    model, optimizer, loader = prepared(run)
    before = []
    try:
        for inputs, targets in loader:
            before.append(weights(model))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    except evenstep.ConfigError as error:
        return len(before), str(error)
    return len(before), None

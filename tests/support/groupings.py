"""Groups that change all the time, as no speeds would have them."""

from dataclasses import dataclass

from evenstep.core.groups import Regroup
from evenstep.core.groups.form import by_rank


@dataclass(frozen=True)
class Restless:
    """One, two and three groups by turns."""

    def form(self, workers):
        return by_rank(range(workers), 3)

    def reform(self, groups, seconds):
        return Regroup(by_rank(range(len(seconds)), len(groups) % 3 + 1), "they are restless")

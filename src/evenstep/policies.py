"""Everything that policies of your own need; docs/custom-policies.md shows how to write them."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from evenstep.core.load import Averages, Even, Expert, Experts, Load, LoadPolicy
from evenstep.core.load.shares import shares_of
from evenstep.core.sync import Command, Commit, Push, Release, SyncPolicy
from evenstep.core.sync.roster import Roster, commit_alone
from evenstep.core.values import Allocation, Problem, Reports
from evenstep.schemes.of_class import recipe_of, scheme_of
from evenstep.schemes.recipe import recipe as _recipe
from evenstep.schemes.recipe import sizes_of

__all__ = [
    "Allocation",
    "Averages",
    "Command",
    "Commit",
    "Even",
    "Expert",
    "Experts",
    "Load",
    "LoadPolicy",
    "Problem",
    "Push",
    "Release",
    "Reports",
    "Roster",
    "SyncPolicy",
    "commit_alone",
    "recipe",
    "scheme_of",
    "shares_of",
    "sizes_of",
]

T = TypeVar("T", bound=Callable[..., Any])


def recipe(target: T) -> T:
    """Register a recipe, so that scheme strings can name it: a function that makes a `Scheme`, or a class of policies.

    A class is enough for a load policy, a sync policy or an expert: see `evenstep.schemes.of_class.recipe_of`. A
    function combines parts as it likes: see `evenstep.schemes.recipe.recipe`. The name is `my_module:my-recipe`.

    Raises:
        ConfigError: A parameter has no type or no default, or the class is not a policy.
    """
    return recipe_of(target) if inspect.isclass(target) else _recipe(target)  # type: ignore[return-value]

"""The members of a quorum in a step, and the policy that divides the global batch among them."""

from dataclasses import dataclass
from typing import Self, final

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.checked import load_policy


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """The members, by rank, and their policy.

    Attributes:
        keys: A number for each member, which a process that is started again does not share with the one before it.
        policy: Divides the global batch; it takes in the reports of a step only if the step counts.
    """

    keys: tuple[int, ...]
    policy: LoadPolicy

    @classmethod
    def of(cls, load: Load, keys: tuple[int, ...], former: "Members | None") -> Self:
        """The members after `former`, of which nothing changes, so that the step may turn out not to count.

        The same members keep their policy; others get a new one, which recalls what was known of those that stay.
        """
        if former is not None and former.keys == keys:
            return cls(keys=keys, policy=former.policy)
        policy = load_policy(load, len(keys))
        if former is not None:
            at = {key: rank for rank, key in enumerate(former.keys)}
            policy.recall([(former.policy, at[key]) if key in at else None for key in keys])
        return cls(keys=keys, policy=policy)

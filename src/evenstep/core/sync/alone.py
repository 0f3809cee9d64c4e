"""A push committed by itself as soon as it is there: what every member but the barrier does with it."""

from evenstep.core.sync.base import Command, Commit, Push


def commit_alone(push: Push) -> list[Command]:
    """The commit of this push, as a step on its share of the global batch; nothing for an empty push."""
    return [Commit((push,), push.share)] if push.samples else []

"""A group's server in virtual time: what of its workers' traffic goes over the network."""

from typing import final

from evenstep.core.coordinate import Bundle


@final
class GroupServer:
    """Between the workers of a group, on their own host, and the server that holds the weights.

    Attributes:
        bundle: Which of their pushes travel as one.
        version, arrives: The weights that were sent to it last, and when they have reached it.
    """

    __slots__ = ("arrives", "bundle", "version")

    def __init__(self) -> None:
        self.bundle = Bundle()
        self.version = -1
        self.arrives = 0.0

"""The loop in which a session serves the messages of one connection."""

import traceback
from collections.abc import Callable
from typing import Protocol, final

from evenstep.core.errors import EvenstepError
from evenstep.transport.base import Connection, ConnectionLostError, Message
from evenstep.transport.codec import close_files


@final
class BrokenServerError(EvenstepError):
    """The server could not carry out a decision: it must end and go back to a snapshot."""


class Serves(Protocol):
    """A session over a connection."""

    def serve_one(self) -> bool:
        """Wait for a message and carry it out; False once the connection has ended."""


def serve_one(
    connection: Connection,
    take: Callable[[Message], None],
    refuse: Callable[[Message, Exception], None],
    lost: Callable[[], None],
) -> bool:
    """Wait for a message and have `take` carry it out; False once the connection has ended.

    `refuse` answers with an error, since a worker without an answer would repeat its request for ever.
    """
    try:
        message = connection.receive()
        close_files(message.files)  # No message to a server needs any.
        try:
            take(message)
        except (ConnectionLostError, BrokenServerError):
            raise
        except Exception as error:
            if not isinstance(error, EvenstepError):
                traceback.print_exc()
            refuse(message, error)
    except ConnectionLostError:
        connection.close()
        lost()
        return False
    return True


def serve_all(session: Serves) -> None:
    """Serve a connection until it ends."""
    while session.serve_one():
        pass

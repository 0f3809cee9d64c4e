"""A grid that records when each reply arrives, and whose rounds need not wait for all replies."""

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, final

from flwr.app import Message
from flwr.serverapp import Grid

_FIRST_POLL: Final = 0.02
_LONGEST_POLL: Final = 1.0


class Reply(NamedTuple):
    """A reply, the id of the message that it answers, and the seconds between the two.

    It may have arrived at any time in the last `unseen` seconds, when nobody looked for replies (as in an evaluation).
    """

    node: int
    message: Message
    asked: str
    away: float
    unseen: float = 0.0


@final
class Exchange:
    """Messages that wait for replies. Each node has at most one training message."""

    def __init__(self, grid: Grid, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.grid, self.clock, self._sleep = grid, clock, sleep
        self._open: dict[str, tuple[int, float]] = {}
        self._looked = clock()
        self._pause = _FIRST_POLL

    @property
    def away(self) -> set[int]:
        """The nodes that have not replied."""
        return {node for node, _ in self._open.values()}

    def send(self, messages: Iterable[Message]) -> dict[str, int]:
        """Send these messages; returns nodes by message id, without messages that the SuperLink did not accept."""
        messages = list(messages)
        now = self.clock()
        ids = self.grid.push_messages(messages) if messages else []
        sent = {
            asked: message.metadata.dst_node_id
            for asked, message in zip(ids, messages, strict=False)
            if asked is not None
        }
        self._open |= {asked: (node, now) for asked, node in sent.items()}
        return sent

    def receive(self) -> list[Reply]:
        """The replies that arrived since the last call."""
        replies = []
        before, self._looked = self._looked, self.clock()
        for message in self.grid.pull_messages(list(self._open)) if self._open else ():
            asked = message.metadata.reply_to_message_id
            node, since = self._open.pop(asked, (None, 0.0))
            if node is not None:
                unseen = max(self._looked - max(before, since) - _LONGEST_POLL, 0.0)
                replies.append(Reply(node, message, asked, self.clock() - since, unseen))
        return replies

    def forget(self, asked: str) -> None:
        """Stop waiting for this reply."""
        self._open.pop(asked, None)

    def open_since(self) -> list[tuple[str, int, float]]:
        """Id, node and age in seconds of each message without a reply."""
        now = self.clock()
        return [(asked, node, now - since) for asked, (node, since) in self._open.items()]

    def pause(self, came: bool, most: float = _LONGEST_POLL) -> None:
        """Wait at most `most` seconds, longer each time up to a second, or not at all if a reply came."""
        if not came:
            self._sleep(max(min(self._pause, most), 0.0))
        self._pause = _FIRST_POLL if came else min(self._pause * 1.5, _LONGEST_POLL)


class View:
    """A grid that is like another one; a base for classes that change a part of it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


@final
class Rounds(View):
    """A grid whose training rounds end with the last reply or after `limit()` seconds; evaluation is unchanged.

    Attributes:
        training: Whether the next call of `send_and_receive` is a round of training, possibly without messages.

    Args:
        exchange: Carries the messages.
        limit: Called when a training round starts; returns the seconds to wait at most, or None for only the timeout.
        arrived: Called with each training reply, also of earlier rounds; returns whether this round gets it.
        ended: Called at the end of a round, with the nodes whose replies are missing.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        limit: Callable[[], float | None],
        arrived: Callable[[Reply], bool],
        ended: Callable[[set[int]], None],
    ) -> None:
        super().__init__(exchange.grid)
        self.exchange = exchange
        self.training = False
        self._limit, self._arrived, self._ended = limit, arrived, ended

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies of a round: replies to these messages, and late ones of earlier rounds."""
        messages = list(messages)
        if not self.training:
            return self.grid.send_and_receive(messages, timeout=timeout) if messages else []
        self.training = False
        exchange = self.exchange
        began = exchange.clock()
        waiting = set(exchange.send(messages))
        only_late = not waiting and bool(exchange.away)
        limits = [each for each in (timeout, None if only_late else self._limit()) if each is not None]
        end = began + min(limits) if limits else None
        received: list[Message] = []
        while True:
            replies = exchange.receive()
            waiting -= {reply.asked for reply in replies}
            received += [reply.message for reply in replies if self._arrived(reply)]
            left = 1.0 if end is None else end - exchange.clock()
            if left <= 0 or not (waiting or (only_late and not received)):
                break
            exchange.pause(bool(replies), left)
        self._ended({node for asked, node, _ in exchange.open_since() if asked in waiting})
        return received

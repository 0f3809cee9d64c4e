"""A grid that records when each reply comes, and whose rounds need not wait for all replies."""

import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, final

from flwr.app import Message
from flwr.serverapp import Grid

_FIRST_POLL: Final = 0.02
_LONGEST_POLL: Final = 1.0


class Reply(NamedTuple):
    """A reply, the id of the message that it answers, and the seconds between the two.

    `unseen` of these seconds, at the end, no reply was looked for, as in an evaluation: it may have come in them.
    """

    node: int
    message: Message
    asked: str
    away: float
    unseen: float = 0.0

    def away_if(self, said: float) -> float:
        """Of the times that the node may have been away, that which is nearest to the seconds that it reports."""
        return max(self.away - self.unseen, min(said, self.away))


@final
class Exchange:
    """Messages without a reply. Each node has at most one message of training."""

    def __init__(self, grid: Grid, clock: Callable[[], float] = time.monotonic) -> None:
        self.grid = grid
        self._clock = clock
        self._open: dict[str, tuple[int, float]] = {}
        self._looked = clock()

    @property
    def away(self) -> set[int]:
        """The nodes that have not replied."""
        return {node for node, _ in self._open.values()}

    def send(self, messages: Iterable[Message]) -> dict[str, int]:
        """Send these messages; node by message id, without messages that the SuperLink did not take."""
        messages = list(messages)
        now = self._clock()
        ids = self.grid.push_messages(messages) if messages else []
        sent = {
            asked: message.metadata.dst_node_id
            for asked, message in zip(ids, messages, strict=False)
            if asked is not None
        }
        self._open |= {asked: (node, now) for asked, node in sent.items()}
        return sent

    def receive(self) -> list[Reply]:
        """The replies that have come since the last call."""
        replies = []
        before, self._looked = self._looked, self._clock()
        for message in self.grid.pull_messages(list(self._open)) if self._open else ():
            asked = message.metadata.reply_to_message_id
            node, since = self._open.pop(asked, (None, 0.0))
            if node is not None:
                unseen = max(self._looked - max(before, since) - _LONGEST_POLL, 0.0)
                replies.append(Reply(node, message, asked, self._clock() - since, unseen))
        return replies

    def forget(self, asked: str) -> None:
        """Stop waiting for this reply."""
        self._open.pop(asked, None)

    def open_since(self) -> list[tuple[str, int, float]]:
        """Id, node and age in seconds of each message without a reply."""
        now = self._clock()
        return [(asked, node, now - since) for asked, (node, since) in self._open.items()]


class Pause:
    """The wait between two calls of `receive`: it grows to a second while no reply comes."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._next = _FIRST_POLL

    def after(self, came: bool, most: float = _LONGEST_POLL) -> None:
        """Wait at most `most` seconds, unless a reply came."""
        if came:
            self._next = _FIRST_POLL
            return
        self._sleep(max(min(self._next, most), 0.0))
        self._next = min(self._next * 1.5, _LONGEST_POLL)


class View(Grid):
    """The same grid; a base for those that change a part of it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def set_run(self, run: object) -> None:
        """As the grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> object:
        """As the grid."""
        return self.grid.run

    def create_message(self, *args: object, **options: object) -> Message:
        """As the grid."""
        return self.grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        """As the grid."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As the grid."""
        return self.grid.send_and_receive(messages, timeout=timeout)


@final
class Rounds(View):
    """A grid whose rounds of training end with the last reply or after `limit()` seconds; evaluation is unchanged.

    Attributes:
        training: Whether the next call of `send_and_receive` is a round of training, possibly without messages.

    Args:
        grid: The grid that carries the messages.
        limit: Called when a round of training starts; the seconds that it may wait, or None for the timeout alone.
        arrived: Called with each reply of training, also of earlier rounds; whether this round gets it.
        ended: Called at the end of a round, with the nodes whose replies are missing.
        clock, sleep: The clock, in seconds, and the function that waits.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        limit: Callable[[], float | None],
        arrived: Callable[[Reply], bool],
        ended: Callable[[set[int]], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(grid)
        self.exchange = Exchange(grid, clock)
        self.training = False
        self._limit, self._arrived, self._ended = limit, arrived, ended
        self._clock, self._sleep = clock, sleep

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The replies of a round: to these messages, and late ones of earlier rounds."""
        messages = list(messages)
        if not self.training:
            return self.grid.send_and_receive(messages, timeout=timeout) if messages else []
        self.training = False
        began = self._clock()
        waiting = set(self.exchange.send(messages))
        only_late = not waiting and bool(self.exchange.away)
        limits = [each for each in (timeout, None if only_late else self._limit()) if each is not None]
        end = began + min(limits) if limits else None
        received: list[Message] = []
        pause = Pause(self._sleep)
        while True:
            replies = self.exchange.receive()
            waiting -= {reply.asked for reply in replies}
            received += [reply.message for reply in replies if self._arrived(reply)]
            left = 1.0 if end is None else end - self._clock()
            if left <= 0 or not (waiting or (only_late and not received)):
                break
            pause.after(bool(replies), left)
        self._ended({node for asked, node, _ in self.exchange.open_since() if asked in waiting})
        return received

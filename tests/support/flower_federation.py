"""A Flower grid in one process and in virtual time: a client runs at once, and its reply comes when its speed says."""

import heapq

import pytest
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from evenstep.integrations.flower import BATCH_SIZE, SECONDS


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Messages say which run they are of."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def size_of(message):
    return message.content.config_records["config"][BATCH_SIZE]


class Nodes(Grid):
    """A grid of which a strategy only asks for the nodes."""

    def __init__(self, nodes):
        self.nodes = list(nodes)

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


class Federation(Nodes):
    """Nodes of these speeds (samples a second, or a function of the node's own number of rounds), one message each.

    Attributes:
        sizes: The sizes of each push of training messages, by node.
        said: What a node says instead of its seconds, by node; None: nothing.
        vanished: From when on a node is not there any more, by node; it answers nothing after that.
        back: From when on it is there again.
    """

    def __init__(self, client, speeds, *, said=(), vanished=(), back=(), samples=lambda message: size_of(message)):
        super().__init__(speeds)
        self.client, self.speeds, self.samples = client, dict(speeds), samples
        self.said, self.vanished, self.back = dict(said), dict(vanished), dict(back)
        self.now, self.sizes, self.done = 0.0, [], dict.fromkeys(speeds, 0)
        self.busy = dict.fromkeys(speeds, 0.0)
        self.replies, self.messages = [], 0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 1e-3)

    def here(self, node, when):
        return when < self.vanished.get(node, float("inf")) or when >= self.back.get(node, float("inf"))

    def get_node_ids(self):
        return [node for node in self.nodes if self.here(node, self.now)]

    def push_messages(self, messages):
        messages = list(messages)
        training = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
        if training:
            self.sizes.append({m.metadata.dst_node_id: size_of(m) for m in training})
        return [self.push(message) for message in messages]

    def push(self, message):
        node = message.metadata.dst_node_id
        self.messages += 1
        asked = f"message {self.messages}"
        message.metadata.__dict__["_message_id"] = asked
        context = Context(1, node, {"partition-id": node}, RecordDict(), {})
        seconds = 0.0
        began = max(self.busy[node], self.now)
        reply = self.client(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            speed = self.speeds[node]
            seconds = self.samples(message) / (speed(self.done[node]) if callable(speed) else speed)
            self.done[node] += 1
            if reply.has_content():
                for metrics in reply.content.metric_records.values():
                    if SECONDS in metrics:
                        said = self.said.get(node, seconds)
                        metrics.update({SECONDS: said}) if said is not None else metrics.pop(SECONDS)
        self.busy[node] = began + seconds
        if self.here(node, began + seconds) or self.here(node, began) is False:
            heapq.heappush(self.replies, (began + seconds, self.messages, asked, reply))
        else:
            failed = Message(Error(code=0, reason="node unavailable"), reply_to=message)
            heapq.heappush(self.replies, (began + seconds + 60.0, self.messages, asked, failed))
        return asked

    def pull_messages(self, message_ids):
        wanted, came, rest = set(message_ids), [], []
        for entry in sorted(self.replies):
            (came if entry[0] <= self.now and entry[2] in wanted else rest).append(entry)
        self.replies = rest
        return [reply for _, _, _, reply in came]

    def send_and_receive(self, messages, *, timeout=None):
        wanted = set(self.push_messages(messages))
        self.now = max([self.now] + [when for when, _, asked, _ in self.replies if asked in wanted])
        return self.pull_messages(wanted)

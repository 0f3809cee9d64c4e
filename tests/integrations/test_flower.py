"""Flower: each node gets its own batch size, by the speed that its replies tell, with Flower's own messages."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs an environment of its own: make test-flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from evenstep.core.errors import ConfigError
from evenstep.integrations.flower import BATCH_SIZE, SECONDS, LoadBalanced, measured

SPEEDS = {11: 1.0, 12: 2.0, 13: 4.0}


@pytest.fixture(autouse=True)
def _task(monkeypatch):
    """Messages say which run they are of."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """A grid of which the strategy only asks for the nodes."""

    def __init__(self, nodes):
        self.nodes = nodes

    def get_node_ids(self):
        return list(self.nodes)


def arrays(value=0.0):
    return ArrayRecord({"w": Array(np.array([value]))})


def answer(message, seconds=None, examples=1, value=0.0):
    metrics = {"num-examples": examples} | ({} if seconds is None else {SECONDS: seconds})
    return Message(RecordDict({"arrays": arrays(value), "metrics": MetricRecord(metrics)}), reply_to=message)


def size_of(message):
    return message.content.config_records["config"][BATCH_SIZE]


def configured(strategy, number=1, nodes=SPEEDS, mean=28):
    """The messages of a round by node, as a node would receive them."""
    config = ConfigRecord({BATCH_SIZE: mean, "lr": 0.1, "steps": 5})
    messages = list(strategy.configure_train(number, arrays(), config, Nodes(nodes)))
    assert config[BATCH_SIZE] == mean
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = f"message {number}"
    return {message.metadata.dst_node_id: message for message in messages}


def train(strategy, rounds, nodes=SPEEDS):
    for number in range(1, rounds + 1):
        messages = configured(strategy, number, nodes)
        replies = [answer(m, size_of(m) / SPEEDS[node] * 1e-3) for node, m in messages.items()]
        strategy.aggregate_train(number, replies)


def test_sizes_follow_speeds_and_nothing_else_changes():
    strategy = LoadBalanced(FedAvg())
    first = configured(strategy)
    assert {node: size_of(message) for node, message in first.items()} == dict.fromkeys(SPEEDS, 28)
    train(strategy, 2)
    messages = configured(strategy, 3)
    assert {node: size_of(message) for node, message in messages.items()} == {11: 12, 12: 24, 13: 48}
    for message in messages.values():
        config = message.content.config_records["config"]
        assert {name: config[name] for name in ("lr", "steps", "server-round")} == {
            "lr": 0.1,
            "steps": 5,
            "server-round": 3,
        }


def test_a_node_that_comes_later_starts_as_the_median():
    strategy = LoadBalanced(FedAvg())
    train(strategy, 2)
    sizes = {node: size_of(m) for node, m in configured(strategy, 3, {11: 1.0, 13: 4.0, 99: 1.0}, 28).items()}
    assert sizes == {11: 12, 13: 48, 99: 24}


def test_the_wrapped_strategy_aggregates_by_dataset_size_and_sees_no_seconds():
    strategy = LoadBalanced(FedAvg())
    messages = configured(strategy)
    replies = [
        answer(messages[11], 0.1, examples=10, value=1.0),
        answer(messages[12], None, examples=30, value=2.0),
        answer(messages[13], 0.2, examples=60, value=3.0),
    ]
    merged, metrics = strategy.aggregate_train(1, replies)
    assert merged["w"].numpy().tolist() == [0.1 + 0.6 + 1.8]
    assert SECONDS not in metrics


def test_a_failure_a_missing_and_a_wrong_time_leave_the_round_whole(caplog):
    strategy = LoadBalanced(FedAvg())
    messages = configured(strategy)
    replies = [
        answer(messages[11], float("nan")),
        answer(messages[12]),
        Message(Error(code=0, reason="killed"), reply_to=messages[13]),
    ]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        strategy.aggregate_train(1, replies)
        logging.getLogger("flwr").propagate = False
    assert "node 11 says that it has trained for nan seconds" in caplog.text
    assert "node 12 sends no evenstep-seconds" in caplog.text
    assert {size_of(message) for message in configured(strategy, 2).values()} == {28}


@pytest.mark.parametrize("config", [{}, {BATCH_SIZE: 0}, {BATCH_SIZE: 2.5}, {BATCH_SIZE: "many"}])
def test_a_config_without_a_mean_batch_size_is_refused(config):
    with pytest.raises(ConfigError, match="needs the mean batch size"):
        LoadBalanced(FedAvg()).configure_train(1, arrays(), ConfigRecord(config), Nodes(SPEEDS))


def test_evaluation_is_the_wrapped_strategys():
    strategy = LoadBalanced(FedAvg())
    messages = list(strategy.configure_evaluate(1, arrays(), ConfigRecord({"x": 1}), Nodes(SPEEDS)))
    assert [message.metadata.message_type for message in messages] == [MessageType.EVALUATE] * 3
    replies = [answer(message, seconds=2.0) for message in messages]
    assert strategy.aggregate_evaluate(1, replies)[SECONDS] == 2.0
    strategy.summary()


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_the_mod_measures_training_alone(kind):
    message = Message(RecordDict({"config": ConfigRecord({BATCH_SIZE: 4})}), dst_node_id=7, message_type=kind)
    message.metadata.__dict__["_message_id"] = "message"
    reply = measured(message, None, lambda given, context: answer(given))
    (metrics,) = reply.content.metric_records.values()
    assert (SECONDS in metrics) is (kind == MessageType.TRAIN)
    assert metrics.get(SECONDS, 1.0) > 0


def test_the_mod_gives_a_reply_without_metrics_some_and_leaves_an_error_alone():
    message = Message(RecordDict(), dst_node_id=7, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "message"
    reply = measured(message, None, lambda given, context: Message(RecordDict(), reply_to=given))
    assert reply.content["metrics"][SECONDS] > 0
    failed = measured(message, None, lambda given, context: Message(Error(code=0), reply_to=given))
    assert failed.has_error()


class Federation(Nodes):
    """Runs the page's client for each node at once, and says what its seconds would be at the node's speed."""

    def __init__(self, client):
        super().__init__(SPEEDS)
        self.client = client
        self.sizes = []

    def send_and_receive(self, messages, timeout=None):
        replies = [self.answer(number, message) for number, message in enumerate(messages)]
        training = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
        if training:
            self.sizes.append({m.metadata.dst_node_id: size_of(m) for m in training})
        return replies

    def answer(self, number, message):
        message.metadata.__dict__["_message_id"] = f"message {number}"
        node = message.metadata.dst_node_id
        context = Context(1, node, {"partition-id": node}, RecordDict(), {})
        reply = self.client(message, context)
        for metrics in reply.content.metric_records.values():
            if SECONDS in metrics:
                assert metrics[SECONDS] > 0
                metrics[SECONDS] = size_of(message) / SPEEDS[node]
        return reply


def test_the_app_of_the_page_trains_with_sizes_by_speed():
    page = Path(__file__).parents[2] / "docs" / "integrations" / "flower.md"
    server, client = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    of_server, of_client = {}, {}
    exec(server.replace("strategy.start(", "result = strategy.start(") + "    found.append(result)\n", of_server)
    exec(client, of_client)
    of_server["found"] = []
    federation = Federation(of_client["app"])
    of_server["main"](federation, None)
    assert federation.sizes[0] == dict.fromkeys(SPEEDS, 32)
    assert federation.sizes[-1] == {11: 14, 12: 27, 13: 55}
    np.testing.assert_allclose(of_server["found"][0].arrays["w"].numpy(), np.ones(8), atol=1e-3)

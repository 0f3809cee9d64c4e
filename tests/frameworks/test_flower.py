"""Flower: each node gets its own batch size, by the speed that its replies tell, with Flower's own messages."""

import gc
import json
import logging
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs an environment of its own: make test-all")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.server.strategy import FedAvg as Older
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedAvgM,
    FedXgbBagging,
    FedXgbCyclic,
)
from support.flower_federation import Federation, Nodes, size_of, task  # noqa: F401

from evenstep.cli.main import main
from evenstep.core.errors import ConfigError
from evenstep.integrations._flower_records import rebased
from evenstep.integrations.flower import BATCH_SIZE, SECONDS, STATISTICS, Asynchronous, LoadBalanced, measured
from evenstep.report.summary import summarise

SPEEDS = {11: 1.0, 12: 2.0, 13: 4.0}


def arrays(value=0.0):
    return ArrayRecord({"w": Array(np.array([value]))})


def answer(message, seconds=None, examples=1, value=0.0):
    metrics = {"num-examples": examples} | ({} if seconds is None else {SECONDS: seconds})
    return Message(RecordDict({"arrays": arrays(value), "metrics": MetricRecord(metrics)}), reply_to=message)


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


def test_a_failure_a_missing_and_a_wrong_time_leave_the_round_whole(logged):
    strategy = LoadBalanced(FedAvg())
    messages = configured(strategy)
    replies = [
        answer(messages[11], float("nan")),
        answer(messages[12]),
        Message(Error(code=0, reason="killed"), reply_to=messages[13]),
    ]
    strategy.aggregate_train(1, replies)
    assert "node 11 says that it has trained for nan seconds" in text(logged)
    assert "node 12 sends no evenstep-seconds" in text(logged)
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


def test_the_app_of_the_page_trains_with_sizes_by_speed():
    page = Path(__file__).parents[2] / "docs" / "integrations" / "flower.md"
    server, client, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    of_server, of_client = {}, {}
    server = server.replace("nodes=2))", "nodes=2), clock=grid.clock, sleep=grid.sleep)")
    exec(server.replace("strategy.start(", "result = strategy.start(") + "    found.append(result)\n", of_server)
    exec(client, of_client)
    of_server["found"] = []
    federation = Federation(of_client["app"], SPEEDS)
    of_server["main"](federation, None)
    assert federation.sizes[0] == dict.fromkeys(SPEEDS, 32)
    assert federation.sizes[-1] == {11: 14, 12: 27, 13: 55}
    np.testing.assert_allclose(of_server["found"][0].arrays["w"].numpy(), np.ones(8), atol=1e-3)


def client(value=lambda node, number: 1.0, examples=lambda node: 1):
    """An app whose nodes add 1 to the model; `value` may say something else of a node's reply."""
    counts = {}

    def app(message, context):
        node = context.node_id
        if message.metadata.message_type != MessageType.TRAIN:
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
        number = counts[node] = counts.get(node, -1) + 1
        weights = message.content["arrays"]["w"].numpy() + value(node, number)
        metrics = MetricRecord({"num-examples": examples(node), SECONDS: 1.0})
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=message)

    return app


@pytest.fixture
def logged():
    """What Flower and evenstep log: one line each."""
    logger, lines = logging.getLogger("flwr"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def started(strategy, federation, rounds, config=None, **options):
    """The result of a run, in the federation's time."""
    config = ConfigRecord({BATCH_SIZE: 28, "steps": 5, "lr": 0.1} if config is None else config)
    return strategy.start(federation, arrays(), rounds, train_config=config, **options)


def text(lines):
    return "\n".join(lines)


def balanced(federation, strategy=None, **options):
    return LoadBalanced(strategy or FedAvg(), clock=federation.clock, sleep=federation.sleep, **options)


def asynchronous(federation, sync, strategy=None, **options):
    return Asynchronous(strategy or FedAvg(), sync, clock=federation.clock, sleep=federation.sleep, **options)


def test_steps_follow_speeds_where_they_are_to(logged):
    seen = []

    def samples(message):
        config = message.content.config_records["config"]
        seen.append((config[BATCH_SIZE], config["steps"], config["lr"]))
        return config[BATCH_SIZE] * config["steps"]

    federation = Federation(client(), SPEEDS, samples=samples)
    started(balanced(federation, mode="steps"), federation, 3, {BATCH_SIZE: 4, "steps": 28, "lr": 0.5})
    assert seen[:3] == [(4, 28, 0.5)] * 3
    assert sorted(seen[-3:]) == [(4, 12, 0.5), (4, 24, 0.5), (4, 48, 0.5)]


def test_the_rate_follows_the_batch_where_it_is_to(logged):
    seen = []

    def samples(message):
        config = message.content.config_records["config"]
        seen.append((config[BATCH_SIZE], config["steps"], config["lr"]))
        return config[BATCH_SIZE] * config["steps"]

    federation = Federation(client(), SPEEDS, samples=samples)
    started(balanced(federation, mode="batch-and-lr"), federation, 3)
    assert sorted(seen[-3:]) == [(size, 5, pytest.approx(0.1 * size / 28)) for size in (12, 24, 48)]


@pytest.mark.parametrize(
    ("mode", "config", "needs"),
    [("steps", {BATCH_SIZE: 4}, "mean number of local steps"), ("batch-and-lr", {BATCH_SIZE: 4}, "the learning rate")],
)
def test_a_config_without_what_the_mode_shares_out_is_refused(mode, config, needs):
    with pytest.raises(ConfigError, match=needs):
        LoadBalanced(FedAvg(), mode=mode).configure_train(1, arrays(), ConfigRecord(config), Nodes(SPEEDS))


@pytest.mark.parametrize("options", [{"late": "never"}, {"mode": "tau"}, {"patience": 0.5}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ConfigError, match="use"):
        LoadBalanced(FedAvg(), **options)


def test_rounds_wait_for_all_without_patience(logged):
    federation = Federation(client(), SPEEDS)
    result = started(balanced(federation), federation, 3)
    assert result.arrays["w"].numpy().tolist() == [3.0]
    assert 28 + 2 * 12 <= federation.now < 28 + 2 * 12 + 3 * 1.5


@pytest.mark.parametrize("late", ["next", "drop"])
def test_a_late_node_is_not_waited_for_and_its_reply_counts_or_not(logged, late):
    """Node 13 is twenty times slower in its third round, which lasts for several of the others'."""
    speeds = SPEEDS | {13: lambda number: 0.2 if number == 2 else 4.0}
    federation = Federation(client(), speeds)
    result = started(balanced(federation, patience=1.5, late=late), federation, 60)
    assert "round 3 goes on without node 13, whose reply is late" in text(logged)
    assert [13 in sizes for sizes in federation.sizes[:5]] == [True, True, True, False, False]
    assert ("the reply of node 13 to round 3 counts in round" in text(logged)) is (late == "next")
    assert ("node 13 to round 3 is too late, and is dropped" in text(logged)) is (late == "drop")
    assert any(13 in sizes for sizes in federation.sizes[5:])
    assert result.arrays["w"].numpy()[0] == pytest.approx(60, rel=0.05)


def test_without_evaluation_no_round_waits_for_a_late_node_after_all(logged):
    speeds = SPEEDS | {13: lambda number: 1e-3 if number == 1 else 4.0}
    federation = Federation(client(), speeds)
    strategy = balanced(federation, FedAvg(fraction_evaluate=0.0), patience=1.5)
    result = started(strategy, federation, 5)
    assert "round 2 goes on without node 13, whose reply is late" in text(logged)
    assert federation.now < 28 + 1.5 * 28 + 3 * 30
    assert result.arrays["w"].numpy().tolist() == [5.0]


def test_a_round_of_late_nodes_alone_waits_for_the_first_of_them(logged):
    speeds = {11: 1.0, 12: lambda number: 0.1 if number == 1 else 1.0}
    federation = Federation(client(), speeds)
    strategy = balanced(federation, FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_train=0.5), patience=1.2)
    result = started(strategy, federation, 12)
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_a_reply_with_a_nan_is_left_out_and_its_node_named(logged):
    federation = Federation(client(lambda node, number: np.nan if node == 12 else 1.0), SPEEDS)
    result = started(balanced(federation), federation, 3)
    assert result.arrays["w"].numpy().tolist() == [3.0]
    assert text(logged).count("the reply of node 12 has a NaN or an infinity in 'w', and is left out") == 3


def test_a_reply_without_examples_is_left_out(logged):
    federation = Federation(client(examples=lambda node: 0 if node == 12 else 1), SPEEDS)
    started(balanced(federation), federation, 1)
    assert "the reply of node 12 has 0.0 as 'num-examples', and is left out" in text(logged)


@pytest.mark.parametrize("said", [1e-9, 1e9])
def test_a_node_that_lies_is_named_and_bounded(logged, said):
    speeds = {11: 1.0, 12: 2.0, 13: 4.0, 14: 2.0}
    federation = Federation(client(), speeds, said={12: said})
    started(balanced(federation), federation, 6)
    assert f"node 12 says {said:.3g} s" in text(logged)
    honest = Federation(client(), speeds)
    started(balanced(honest), honest, 6)
    assert abs(federation.sizes[-1][12] - honest.sizes[-1][12]) <= 3
    assert federation.now < 1.2 * honest.now


@pytest.mark.parametrize("sync", ["asp", "ssp:bound=1", "dssp:lower=1,upper=4", "bsp", "grouped:groups=2"])
def test_without_rounds_all_work_is_in_the_model(logged, sync):
    federation = Federation(client(), SPEEDS)
    found = []
    result = started(
        asynchronous(federation, sync, rate="share"),
        federation,
        4,
        evaluate_fn=lambda number, model: found.append(number) or MetricRecord({"w": float(model["w"].numpy()[0])}),
    )
    counted = result.arrays["w"].numpy()[0]  # A push that missed more than a round counts less.
    assert 3.4 < counted < 4.0 if sync[:4] in ("asp", "dssp", "grou") else counted == pytest.approx(4.0)
    assert found[0] == 0
    assert found[-1] == 4
    assert "update" in text(logged)
    assert sum(map(len, federation.sizes)) == 12


def test_with_a_barrier_the_model_is_that_of_fedavg(logged):
    apps = [client(lambda node, number: node * 1.5, examples=lambda node: node) for _ in range(2)]
    one, other = (Federation(app, SPEEDS) for app in apps)
    plain = started(FedAvg(), one, 3)
    ours = started(asynchronous(other, "bsp"), other, 3)
    assert ours.arrays["w"].numpy() == pytest.approx(plain.arrays["w"].numpy(), rel=1e-12)


def test_fast_nodes_run_ahead_as_far_as_the_bound_and_take_less_time_than_rounds(logged):
    speeds = {11: lambda n: 1.0 if n == 1 else 8.0, 12: lambda n: 1.0 if n == 3 else 8.0, 13: 8.0}
    times = {}
    for sync in ("bsp", "ssp:bound=3"):
        federation = Federation(client(), speeds)
        started(asynchronous(federation, sync), federation, 8)
        times[sync] = federation.now
    assert times["ssp:bound=3"] < 0.85 * times["bsp"]


def test_a_node_that_vanishes_leaves_and_joins_when_it_is_back(logged):
    federation = Federation(client(), SPEEDS, vanished={12: 20.0}, back={12: 150.0})
    result = started(asynchronous(federation, "ssp:bound=1"), federation, 12)
    assert "node 12 has vanished: training goes on without it" in text(logged)
    assert text(logged).count("node 12 takes part") == 2
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_a_nan_a_failure_and_a_node_that_hangs_hold_nobody_up(logged):
    app = client(lambda node, number: np.nan if node == 12 and number == 1 else 1.0)

    def failing(message, context):
        reply = app(message, context)
        train = message.metadata.message_type == MessageType.TRAIN
        if train and context.node_id == 13 and federation.done[13] == 1:
            return Message(Error(code=0, reason="killed"), reply_to=message)
        return reply

    speeds = SPEEDS | {11: lambda number: 1e-3 if number == 1 else 1.0}
    federation = Federation(failing, speeds)
    result = started(asynchronous(federation, "ssp:bound=0"), federation, 6, timeout=100)
    assert "the reply of node 12 has a NaN or an infinity in 'w', and is left out" in text(logged)
    assert "node 13 failed: killed" in text(logged)
    assert "node 11 has been away for 10" in text(logged)
    assert np.isfinite(result.arrays["w"].numpy()).all()


@pytest.mark.parametrize("sync", ["asp", "ssp:bound=1", "bsp"])
@pytest.mark.parametrize("fault", ["fails", "nan"])
def test_a_node_whose_work_is_lost_at_once_does_not_end_training(logged, sync, fault):
    """Of the 15 pieces of a training without the fault, the other two nodes do at least their ten."""
    usual, useful = client(), []

    def app(message, context):
        reply = usual(message, context)
        if context.node_id != 13:
            useful.append(message)
        elif fault == "fails":
            return Message(Error(code=0, reason="killed"), reply_to=message)
        else:
            reply.content["arrays"]["w"] = Array(np.array([np.nan]))
        return reply

    federation = Federation(app, {11: 1.0, 12: 1.0, 13: 1e3})
    result = started(asynchronous(federation, sync, FedAvg(fraction_evaluate=0.0)), federation, 5)
    assert len(useful) >= 10
    assert result.arrays["w"].numpy()[0] > 4.0
    assert "ends early" not in text(logged)


def test_training_without_any_usable_reply_ends_and_says_so(logged):
    federation = Federation(client(lambda node, number: np.nan), SPEEDS)
    result = started(asynchronous(federation, "ssp:bound=1"), federation, 3)
    assert text(logged).count("training ends early: no node has sent a usable reply in 3 tries each") == 1
    assert result.arrays["w"].numpy().tolist() == [0.0]


def test_a_buffer_gathers_replies_and_servers_momentum_sees_updates(logged):
    federation = Federation(client(), SPEEDS)
    strategy = asynchronous(federation, "asp", FedAvgM(server_learning_rate=1.0, server_momentum=0.5), buffer=3)
    result = started(strategy, federation, 4)
    assert sum(line.startswith("update") for line in logged) == 4
    assert result.arrays["w"].numpy()[0] > 4.0


@pytest.mark.parametrize("outer", [LoadBalanced, Asynchronous])
@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (LoadBalanced(FedAvg()), "cannot wrap LoadBalanced"),
        (Asynchronous(FedAvg()), "cannot wrap Asynchronous"),
        (FedAvg, "give an instance, such as FedAvg()"),
        ("fedavg", "wraps a strategy of flwr.serverapp.strategy, not 'fedavg'"),
        (Older(), "Those of flwr.server.strategy, Flower's older API"),
    ],
)
def test_only_a_strategy_that_is_not_wrapped_yet_is_wrapped(outer, inner, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        outer(inner)


@pytest.mark.parametrize(
    ("wrap", "scheme"),
    [(LoadBalanced, name) for name in ("ssp:bound=3", "asp", "grouped:groups=2", "local-sgd")]
    + [(Asynchronous, name) for name in ("lb-bsp", "local-sgd", "ssp:bound=3,load=lb-bsp")],
)
def test_a_scheme_of_which_a_part_would_be_ignored_is_refused(wrap, scheme):
    with pytest.raises(ConfigError, match="takes only"):
        wrap(FedAvg(), scheme)


def test_a_scheme_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match="a scheme must be a string such as 'lb-bsp'"):
        LoadBalanced(FedAvg(), None)


@pytest.mark.parametrize("wrap", ["balanced", "asynchronous"])
@pytest.mark.parametrize(
    ("arrays", "metrics", "said"),
    [
        (None, {"num-examples": 1}, "has other arrays than the model"),
        ({"w": np.ones(2)}, {"num-examples": 1}, "has other arrays than the model"),
        ({"v": np.ones(1)}, {"num-examples": 1}, "has other arrays than the model"),
        ({"w": np.ones(1)}, {"loss": 1.0}, "has no 'num-examples' in its metrics"),
    ],
)
def test_a_reply_that_no_mean_can_take_is_left_out_and_its_node_named(logged, wrap, arrays, metrics, said):
    usual = client()

    def app(message, context):
        if context.node_id != 12 or message.metadata.message_type != MessageType.TRAIN:
            return usual(message, context)
        records = {"metrics": MetricRecord(metrics | {SECONDS: 1.0})}
        if arrays is not None:
            records["arrays"] = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        return Message(RecordDict(records), reply_to=message)

    federation = Federation(app, SPEEDS)
    strategy = balanced(federation) if wrap == "balanced" else asynchronous(federation, "ssp:bound=1")
    result = started(strategy, federation, 3)
    assert f"the reply of node 12 {said}, and is left out" in text(logged)
    assert result.arrays["w"].numpy()[0] >= (3.0 if wrap == "balanced" else 1.0)


def test_a_node_that_never_sends_seconds_is_named_once(logged):
    federation = Federation(client(), SPEEDS, said={12: None})
    started(balanced(federation), federation, 3)
    assert text(logged).count("node 12 sends no evenstep-seconds") == 1


def test_without_rounds_a_client_is_told_the_rounds_worth_and_not_the_updates(logged):
    seen = []

    def samples(message):
        seen.append(message.content.config_records["config"]["server-round"])
        return size_of(message)

    federation = Federation(client(), SPEEDS, samples=samples)
    started(asynchronous(federation, "ssp:bound=1"), federation, 4)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3, 4}


class Changing(FedAvg):
    """As in Flower's tutorials: the config changes in place, here in every second round."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round % 2 == 0:
            config["lr"] *= 0.5
            config[BATCH_SIZE] *= 2
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize("sync", [None, "ssp:bound=1", "asp"])
def test_a_strategy_may_change_the_config_once_in_each_round(logged, sync):
    seen = {}

    def samples(message):
        config = message.content.config_records["config"]
        seen.setdefault(config["server-round"], []).append((config["lr"], config[BATCH_SIZE]))
        return size_of(message)

    federation = Federation(client(), SPEEDS, samples=samples)
    wrapped = asynchronous(federation, sync, Changing()) if sync else balanced(federation, Changing())
    started(wrapped, federation, 5)
    mean = {1: 28, 2: 56, 3: 56, 4: 112, 5: 112}
    for number, given in seen.items():
        assert {rate for rate, _ in given} == {0.1 * 28 / mean[number]}
        assert sum(size for _, size in given) == mean[number] * len(given)
    assert set(seen) == set(mean)


@pytest.mark.parametrize("scheme", ["lb-bsp", "ssp:bound=1"])
def test_the_report_knows_nodes_rounds_sizes_and_staleness(scheme, tmp_path, capsys):
    """Node 12 fails once."""
    app = client()

    def failing(message, context):
        train = message.metadata.message_type == MessageType.TRAIN
        if train and context.node_id == 12 and federation.done[12] == 4:
            return Message(Error(code=0, reason="killed"), reply_to=message)
        return app(message, context)

    federation = Federation(failing, SPEEDS, samples=lambda message: 5 * size_of(message))
    wrap = balanced if scheme == "lb-bsp" else asynchronous
    given = {} if scheme == "lb-bsp" else {"sync": scheme}
    started(wrap(federation, run_dir=tmp_path, **given), federation, 6)
    summary = summarise(tmp_path)
    assert summary.scheme == scheme
    assert len(summary.workers) == 3
    assert [leave.why for leave in summary.served.leaves] == ["killed"]
    if scheme == "lb-bsp":
        assert sorted(worker.iterations for worker in summary.workers) == [5, 6, 6]
        assert {worker.first_batch_size for worker in summary.workers} == {140}
        assert sorted(worker.last_batch_size for worker in summary.workers) == [60, 120, 240]
        assert summary.served.commits == 6
    else:
        assert max(each.pushes.mean_staleness for each in summary.workers) > 0
    assert summary.served.samples_committed == sum(worker.samples for worker in summary.workers)
    main(["report", "--json", str(tmp_path)])
    assert len(json.loads(capsys.readouterr().out)[0]["workers"]) == 3


def test_a_wrapper_of_privacy_keeps_the_weights_of_the_strategy_inside(logged):
    """Its own attribute says nothing of the weight, so the one of FedAvg counts."""

    def app(message, context):
        reply = client(examples=lambda node: node)(message, context)
        for metrics in reply.content.metric_records.values():
            metrics["rows"] = metrics.pop("num-examples")
        return reply

    for wrap, given in ((balanced, {}), (asynchronous, {"sync": "bsp"})):
        federation = Federation(app, SPEEDS)
        private = DifferentialPrivacyServerSideFixedClipping(FedAvg(weighted_by_key="rows"), 0.0, 100.0, 3)
        result = started(wrap(federation, strategy=private, **given), federation, 2)
        assert result.arrays["w"].numpy() == pytest.approx(2.0)


@pytest.mark.parametrize("wrap", ["balanced", "asynchronous"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.ones(3), "has other arrays than the model"),
        (np.array(["x"]), "has <U1 in 'w', and the model float64"),
        (np.array([1.0], np.float32), "has float32 in 'w', and the model float64"),
        (np.array([1.0j]), "has complex128 in 'w', and the model float64"),
        (None, "has bytes in 'w' that are not an array"),
    ],
)
def test_the_bytes_of_an_array_count_and_not_the_shape_that_it_states(logged, wrap, data, said):
    usual = client()

    def app(message, context):
        reply = usual(message, context)
        if context.node_id == 12 and message.metadata.message_type == MessageType.TRAIN:
            reply.content["arrays"]["w"].data = b"junk" if data is None else Array(data).data
        return reply

    federation = Federation(app, SPEEDS)
    strategy = balanced(federation) if wrap == "balanced" else asynchronous(federation, "ssp:bound=1")
    result = started(strategy, federation, 3)
    assert f"the reply of node 12 {said}, and is left out" in text(logged)
    assert result.arrays["w"].numpy().shape == (1,)


def header(text):
    """The bytes of an array with this header and no data."""
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text.encode() + b"\n"


def without_content(reply):
    reply.__dict__["_content"] = None


def with_bytes(data):
    def change(reply):
        reply.content["arrays"]["w"].data = data

    return change


def with_metrics(**metrics):
    def change(reply):
        reply.content["metrics"].update(metrics)

    return change


def with_a_second_record(reply):
    reply.content["more"] = MetricRecord({"x": 1})


def with_another_name(reply):
    reply.content["others"] = reply.content.pop("metrics")


def as_torch(reply):
    reply.content["arrays"]["w"].stype = "torch.Tensor"


@pytest.mark.parametrize("sync", [None, "bsp", "asp"])
@pytest.mark.parametrize(
    "change",
    [
        without_content,
        with_bytes(header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }")),
        with_bytes(header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }")),
        with_bytes(header("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }")),
        with_bytes(b"PK\x03\x04"),
        as_torch,
        with_metrics(**{"num-examples": 1e308}),
        with_metrics(**{"num-examples": [1]}),
        with_metrics(**{"num-examples": float("nan")}),
    ],
)
def test_a_reply_that_cannot_be_handled_changes_nothing_and_its_node_is_named(logged, change, sync):
    """Nodes 12 and 13 each send such a reply in every round: two of them are no majority."""
    usual = client()

    def app(message, context):
        reply = usual(message, context)
        if context.node_id in (12, 13) and message.metadata.message_type == MessageType.TRAIN:
            change(reply)
        return reply

    federation = Federation(app, {11: 1.0, 12: 1e3, 13: 1e3, 14: 1.0, 15: 1.0})
    strategy = asynchronous(federation, sync) if sync else balanced(federation)
    result = started(strategy, federation, 3)
    for node in (12, 13):
        assert re.search(rf"the reply of node {node} .*, and is left out", text(logged))
    assert result.arrays["w"].numpy()[0] == pytest.approx(3.0, abs=0.6 if sync == "asp" else 1e-9)
    if not sync:
        assert federation.sizes[-1] == dict.fromkeys(federation.nodes, 28)


@pytest.mark.parametrize("sync", [None, "bsp"])
@pytest.mark.parametrize(
    "change", [with_a_second_record, with_another_name, with_metrics(more=1.0), with_metrics(loss=[1.0, 2.0])]
)
@pytest.mark.parametrize("of", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_reply_whose_metrics_are_not_those_of_the_others_is_left_out(logged, change, sync, of):
    """Flower's strategies take no mean of such metrics, and would end the training."""
    usual = client()

    def app(message, context):
        reply = usual(message, context)
        reply.content["metrics"]["loss"] = [1.0]
        if context.node_id == 12 and message.metadata.message_type == of:
            change(reply)
        return reply

    federation = Federation(app, SPEEDS)
    strategy = asynchronous(federation, sync) if sync else balanced(federation)
    result = started(strategy, federation, 3)
    assert "the reply of node 12 has other records or metrics than most, and is left out" in text(logged)
    assert result.arrays["w"].numpy()[0] == pytest.approx(3.0)
    assert result.evaluate_metrics_clientapp[3]["loss"] == [1.0]


def statistics_of(variance, count=7):
    values = {"bn.weight": np.array([1.0]), "bn.running_var": np.array([variance]), "bn.tracked": np.array(count)}
    return ArrayRecord({name: Array(each) for name, each in values.items()})


@pytest.mark.parametrize("names", [None, ()])
@pytest.mark.parametrize("rate", ["share", "raw"])
def test_statistics_are_averaged_and_changes_of_parameters_are_added(logged, names, rate):
    """The variance falls from 10 to 0.1 in all nodes: five changes of -9.9 each are more than it has."""

    def app(message, context):
        given = message.content["arrays"]
        arrays = statistics_of(0.1, int(given["bn.tracked"].numpy()) + 1)
        arrays["bn.weight"] = Array(given["bn.weight"].numpy() + 1.0)
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    federation = Federation(app, dict.fromkeys(range(11, 16), 1.0) | {15: 0.3})
    given = {} if names is None else {"statistics": names}
    strategy = asynchronous(federation, "asp", FedAvg(fraction_evaluate=0.0), rate=rate, **given)
    least = []
    config = ConfigRecord({BATCH_SIZE: 8, "steps": 1})
    result = strategy.start(
        federation,
        statistics_of(10.0),
        6,
        train_config=config,
        evaluate_fn=lambda number, model: least.append(float(model["bn.running_var"].numpy()[0])),
    )
    assert (min(least) > 0.0) is (names is None)
    assert result.arrays["bn.weight"].numpy()[0] > 5.0
    assert result.arrays["bn.tracked"].numpy().dtype == np.int64


def test_a_late_reply_moves_statistics_to_its_own():
    old, new = statistics_of(10.0), statistics_of(0.5)
    content = RecordDict({"arrays": statistics_of(1.0)})
    moved = rebased(content, old, new, 0.5, STATISTICS)["arrays"]["bn.running_var"]
    assert moved.numpy().tolist() == [0.75]


def test_clients_that_loop_over_their_data_are_named_once_and_keep_equal_sizes(logged):
    """They have 500, 130 and 220 samples, whatever the batch size."""
    seconds = {11: 5.0, 12: 1.3, 13: 2.2}
    federation = Federation(client(), dict.fromkeys(seconds, 1.0), samples=lambda m: seconds[m.metadata.dst_node_id])
    started(balanced(federation), federation, 15)
    assert federation.sizes[-1] == dict.fromkeys(seconds, 28)
    assert text(logged).count("does not follow the batch size") == 1
    assert re.search(r"the time of node 1\d.* does not follow the batch size, so such nodes get at least", text(logged))


def test_statistics_in_one_text_are_refused():
    with pytest.raises(ConfigError, match=re.escape("give ['running_var']")):
        Asynchronous(FedAvg(), statistics="running_var")


def test_counters_stay_whole_numbers_whatever_the_strategy_makes_of_them(logged):
    """FedAvg's mean of them has fractions, and a client that loads it into its own counter replies a whole number."""

    def app(message, context):
        counted = message.content["arrays"]["bn.tracked"].numpy()
        arrays = statistics_of(1.0, int(counted) + context.node_id)
        metrics = MetricRecord({"num-examples": 1, SECONDS: 1.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    federation = Federation(app, {11: 1.0, 12: 1.0})
    strategy = balanced(federation, FedAvg(fraction_evaluate=0.0))
    config = ConfigRecord({BATCH_SIZE: 8, "steps": 1})
    result = strategy.start(federation, statistics_of(1.0, 0), 3, train_config=config)
    assert "left out" not in text(logged)
    assert result.arrays["bn.tracked"].numpy().dtype == np.int64
    assert 33 <= result.arrays["bn.tracked"].numpy() <= 36


def test_a_node_whose_replies_are_left_out_does_not_set_the_sizes(logged):
    """Node 13 says that it is very fast."""
    federation = Federation(client(lambda node, number: np.nan if node == 13 else 1.0), SPEEDS | {13: 1e3})
    started(balanced(federation), federation, 5)
    assert federation.sizes[-1][13] == 28
    assert federation.sizes[-1][12] > federation.sizes[-1][11]


def test_a_late_reply_that_comes_during_an_evaluation_is_no_lie(logged):
    """Node 13 needs 140 s in its third round, which the others leave for an evaluation of 2000 s."""
    speeds = dict.fromkeys((11, 12, 14, 15), 1.0) | {13: lambda number: 0.2 if number == 2 else 1.0}
    federation = Federation(client(), speeds)
    strategy = balanced(federation, FedAvg(fraction_evaluate=0.0), patience=1.5)
    started(strategy, federation, 6, evaluate_fn=lambda number, model: federation.sleep(2000.0))
    assert "round 3 goes on without node 13" in text(logged)
    assert "the reply of node 13 to round 3 counts in round 4" in text(logged)
    assert "node 13 says" not in text(logged)


def test_an_evaluation_that_takes_longer_than_the_timeout_lets_no_node_leave(logged):
    federation = Federation(client(), SPEEDS)
    strategy = asynchronous(federation, "ssp:bound=3")
    started(strategy, federation, 4, evaluate_fn=lambda number, model: federation.sleep(120.0), timeout=100)
    assert "has been away" not in text(logged)
    assert sum(map(len, federation.sizes)) == 12


def test_training_without_rounds_ends_though_fewer_nodes_are_left_than_the_strategy_needs(logged, monkeypatch):
    """FedAvg would wait for two nodes in the last evaluation."""

    def waited(seconds):
        raise AssertionError("the strategy waits for a node")

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", waited)
    federation = Federation(client(), {11: 1.0, 12: 2.0}, vanished={12: 60.0})
    result = started(asynchronous(federation, "ssp:bound=1"), federation, 8)
    assert "node 12 has vanished" in text(logged)
    assert list(result.evaluate_metrics_clientapp) == [8]


@pytest.mark.parametrize("wrap", [LoadBalanced, Asynchronous])
@pytest.mark.parametrize("strategy", [FedXgbBagging, FedXgbCyclic])
def test_a_strategy_of_trees_is_refused(wrap, strategy):
    """Its replies have other shapes than the model, so that each would be left out."""
    with pytest.raises(ConfigError, match=f"cannot wrap {strategy.__name__}, whose models are trees"):
        wrap(strategy())


def test_another_strategy_around_a_wrapper_whose_start_it_does_not_call_is_refused(logged, tmp_path):
    federation = Federation(client(), SPEEDS)
    for inner, said in (
        (asynchronous(federation, "asp"), "let Asynchronous wrap the other strategy"),
        (balanced(federation, patience=2), "let LoadBalanced wrap the other strategy"),
        (balanced(federation, run_dir=tmp_path), "let LoadBalanced wrap the other strategy"),
    ):
        with pytest.raises(ConfigError, match=said):
            started(DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 100.0, 3), federation, 2)
    started(DifferentialPrivacyServerSideFixedClipping(balanced(federation), 0.0, 100.0, 3), federation, 2)
    assert federation.sizes[-1][13] > federation.sizes[-1][11]


def test_models_of_earlier_rounds_are_not_kept(logged):
    """A node of a large federation is in few rounds, and its last model would be another one than the others'."""
    federation = Federation(client(), dict.fromkeys(range(1, 41), 1.0))
    strategy = balanced(federation, FedAvg(fraction_train=0.05, fraction_evaluate=0.0))
    models = []
    started(
        strategy,
        federation,
        20,
        evaluate_fn=lambda number, model: models.append(weakref.ref(model)),
    )
    gc.collect()
    assert sum(model() is not None for model in models) < 5


def test_without_a_timeout_nodes_are_waited_for(logged):
    federation = Federation(client(), SPEEDS | {11: lambda number: 1e-3 if number == 1 else 1.0})
    result = started(asynchronous(federation, "ssp:bound=1"), federation, 3, timeout=None)
    assert "has been away" not in text(logged)
    assert result.arrays["w"].numpy()[0] > 2.0

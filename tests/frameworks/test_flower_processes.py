"""Flower for real: a SuperLink and SuperNodes as processes. One node is slow, one dies, one sends NaN,
one lies and the app of one raises.

And Flower's simulation engine, on Ray.
"""

import re
import time
from importlib.util import find_spec

import pytest

pytest.importorskip("flwr", reason="needs an environment of its own: make test-all")

from support.flower_processes import EXAMPLE, Federation, Pipe, end, faulty_app, run_app

pytestmark = pytest.mark.multiprocess

SLOW, NAN, LIAR, VICTIM, BROKEN = 1, 2, 3, 4, 5
ROUNDS = 2
NODES = [{}, {"slowdown": 10}, {"fault": '"nan"'}, {"fault": '"lie"'}, {"fault": '"stuck"'}, {"fault": '"crash"'}]


@pytest.fixture
def federation(tmp_path):
    federation = Federation(tmp_path, NODES)
    yield federation
    federation.close()


def accuracy(text):
    return float(re.search(r"final accuracy: ([\d.]+)", text)[1])


def test_training_goes_on_and_each_faulty_node_is_named(federation, tmp_path):
    """With rounds, in which a node is killed while it trains, and without, when it comes back."""
    app = faulty_app(tmp_path / "app")
    stuck = Pipe(tmp_path / "stuck")
    run = run_app(federation, app, rounds=ROUNDS, nodes=6, patience=1.5, steps=200)
    stuck.wait()
    end(federation.nodes[VICTIM])
    text = run.text()
    dead = federation.id_of(VICTIM)
    assert re.search(rf"round \d goes on without node {dead}, whose reply is late", text)
    assert f"the reply of node {federation.id_of(NAN)} has a NaN or an infinity" in text
    assert re.search(rf"node {federation.id_of(LIAR)} says 1e\+09 s, which count as [\d.]+: it was away for", text)
    assert re.search(rf"batch sizes \d+ \(node ({federation.id_of(SLOW)}|{federation.id_of(LIAR)})\) to", text)
    assert accuracy(text) > 0.5

    run = run_app(federation, app, rounds=ROUNDS, nodes=5, scheme='"ssp:bound=1"', timeout=20.0)
    run.wait_for("takes part")
    federation.nodes[VICTIM] = federation.node(VICTIM, {})
    text = run.text()
    assert re.search(rf"node {dead} (has been away for \d+ s|has vanished|failed)", text) or f"node {dead}" not in text
    assert f"node {federation.id_of(VICTIM)} takes part" in text
    assert federation.id_of(VICTIM) != dead
    assert f"the reply of node {federation.id_of(NAN)} has a NaN or an infinity" in text
    assert f"node {federation.id_of(BROKEN)} failed" in text
    done = re.findall(r"(\d+) \(\d+ behind\)", text)
    assert not {str(federation.id_of(NAN)), str(federation.id_of(BROKEN))} & set(done)
    assert len(done) >= ROUNDS * 4
    assert accuracy(text) > 0.5


LATE = r"goes on without node {}, whose reply is late"
AWAY = r"node {} (has been away for|has vanished|failed)"
LEFT_OUT = r"the reply of node {} .* and is left out"
NAMED = {
    **dict.fromkeys(("killed", "stopped", "hangs", "exits"), (LATE, AWAY)),
    "raises": (r"error in reply from node {}", r"node {} failed"),
    **dict.fromkeys(("another model", "NaN"), (LEFT_OUT, LEFT_OUT)),
    "lies": (r"node {} says 1e\+09 s, which count as",),
}
"""With rounds, and without, where nothing rests on the seconds that a node says."""
WAYS = {"with rounds": {"patience": 1.5}, "without rounds": {"scheme": '"ssp:bound=1"', "timeout": 20.0}}


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "way"), [(fault, way) for fault in NAMED for way in [*WAYS][: len(NAMED[fault])]])
def test_a_fault_of_one_node_is_named_and_the_others_do_the_work(fault, way, tmp_path, record_property):
    federation = Federation(tmp_path, [{}, {"fault": '"{}"'.format(fault.replace(" ", "-"))}, {}])
    try:
        text = run_app(federation, faulty_app(tmp_path / "app"), rounds=4, nodes=3, **WAYS[way]).text()
        node = federation.id_of(1)
    finally:
        federation.close()
    seconds = time.time() - (tmp_path / "fired").stat().st_mtime
    assert re.search(NAMED[fault][way == "without rounds"].format(node), text), text
    assert accuracy(text) > 0.5
    record_property("cell", ["flower", "", way, fault, "finish", round(seconds, 1)])


@pytest.fixture
def simulation(tmp_path):
    federation = Federation(tmp_path, simulated=3)
    yield federation
    federation.close()


@pytest.mark.skipif(find_spec("ray") is None, reason="Flower's simulation engine needs Ray: make test-all")
def test_the_example_runs_in_flowers_simulation_engine(simulation):
    text = run_app(simulation, EXAMPLE, rounds=2, nodes=3).text()
    assert text.count("configure_train: batch sizes") == 2
    assert accuracy(text) > 0.5

    text = run_app(simulation, EXAMPLE, rounds=2, nodes=3, scheme='"ssp:bound=1"').text()
    assert "update 6: of" in text
    assert accuracy(text) > 0.5

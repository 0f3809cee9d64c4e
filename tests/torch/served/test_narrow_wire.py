"""A narrow wire to the servers: pushes and pulls are rounded, what rounding leaves out follows, and bytes are saved."""

import socket
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from support import served_faults, served_training
from support.faulty import Fault
from support.memory_servers import SAMPLES, Trial
from support.processes import CONTEXT, results, run_workers
from support.served import environment, outer_host, run_served, server_events, serving
from support.training import Run

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ParameterSpec, ShardLayout
from evenstep.schemes import parse_scheme
from evenstep.schemes.scheme import Scheme, Served
from evenstep.tensors.messages import flat_views
from evenstep.tensors.narrow import NarrowMessages

pytestmark = pytest.mark.multiprocess

UNEVEN = {"samples": 187, "epochs": 2}
EVERY = {Fault.DROP: 0.08, Fault.DUPLICATE: 0.08, Fault.DELAY: 0.06, Fault.REORDER: 0.08}


@pytest.mark.parametrize("network", ["", "tcp", "tls"])
@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    [
        ("asp:period=4,outer_lr=0.3,wire=int8", "momentum"),
        ("dssp:period=4,outer=sgd,outer_lr=0.9,wire=bf16,servers=2", "adam"),
        ("ssp:bound=1,rate=raw,wire=int8", "sgd"),
        ("asp:rate=raw,wire=bf16,servers=2", "sgd"),
    ],
)
def test_it_is_the_mathematics_of_one_process_that_rounds_alike(tmp_path, scheme, optimizer, network):
    run, parsed = Run(scheme=scheme, optimizer=optimizer, **UNEVEN), parse_scheme(scheme)
    served = {"servers": parsed.served.servers, "network": bool(network), "run_dir": tmp_path}
    if network == "tls":
        served["listen"] = outer_host()
    values = results(run_served(served_training.train_in_periods, 3, run, **served))
    pushes = [(event.worker, event.pulled) for event in server_events(tmp_path, "push")]
    begun = {(event.worker, event.epoch): event.version for event in server_events(tmp_path, "begin")}
    claims = [value["claims"] for value in values]
    whole = 60 if parsed.period else 15
    expected, plain = (
        served_training.train_in_periods_alone(run, claims, pushes, parsed.outer, whole, wire, begun)
        for wire in (parsed.served.wire, "float32")
    )
    # The servers' order of sums decides the last bit of float64, which decides between two numbers of float32 now and
    # then: differences of 0.1 go as far as 1e-8 apart. Rounding on the wire is a thousand times as coarse.
    for value in values:
        np.testing.assert_allclose(value["ended"][-1], expected, rtol=0, atol=1e-7 if parsed.period else 1e-10)
    assert 1e-5 < np.abs(np.subtract(expected, plain)).max() < 0.02  # It rounds, and stays near.


def test_workers_that_compute_meanwhile_leave_an_epoch_alike(tmp_path):
    run = Run(scheme="asp:exchange=overlapped,wire=int8,servers=2", num_workers=1, **UNEVEN)
    function = served_training.train_in_periods
    values = results(run_served(function, 2, run, run_dir=tmp_path, servers=2, network=True))
    assert values[0]["ended"] == values[1]["ended"]
    assert np.isfinite(values[0]["ended"]).all()
    assert sum(event.samples for event in server_events(tmp_path, "push")) == run.samples * run.epochs


@pytest.mark.parametrize(("shards", "local"), [(1, True), (2, False)])
def test_what_is_lost_or_repeated_on_the_way_is_applied_once(tmp_path, shards, local):
    trial = Trial(tmp_path, f"ssp:bound=2,wire=int8,servers={shards}", shards, EVERY, seed=1, local=local)
    weights = trial.run()  # Each worker compares its weights with those that the servers think it has.
    assert weights[0] == weights[1] == weights[2]
    assert trial.primary.coordinator.samples == 2 * SAMPLES
    assert set(trial.fired) == set(Fault)


def relayed(address, carried, stack):
    """Another address of this server; `carried` counts the bytes in both directions."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def carry(source, sink):
        while data := source.recv(2**16):
            carried.append(len(data))
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def serve():
        while True:
            try:
                near, _ = door.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://127.0.0.1:{door.getsockname()[1]}"


@pytest.mark.parametrize("period", ["", ",period=2"])
def test_a_narrow_wire_carries_fewer_bytes(tmp_path, period):
    carried, tallied = {}, {}
    for wire in ("float32", "bf16", "int8"):
        folder, carried[wire] = tmp_path / wire, []
        folder.mkdir()
        settings = {"snapshots": str(folder / "snapshots"), "count": 1, "workers": 1}
        run = Run(scheme=f"asp:wire={wire}{period}", samples=80, epochs=1, dtype=torch.float32, optimizer="sgd")
        with ExitStack() as stack:
            (addresses,), secret = stack.enter_context(serving(settings, 1))
            (tcp,) = [each for each in addresses if each.startswith("tcp:")]
            door = relayed(tcp, carried[wire], stack)
            told = environment([[door]], secret, folder)
            results(run_workers(served_training.train_a_large_model, 1, run, environment=told))
        tallied[wire] = sum(event.bytes for event in server_events(folder, "tally"))
    exchanges = 80 // 5 // (2 if period else 1)
    message = 4 * served_training.LARGE
    # Whole are the weights that begin the run, the first ones that come back, and the last.
    for wire, part in (("float32", 1.0), ("bf16", 0.5), ("int8", 0.254)):
        expected = message * (3 + part * (2 * exchanges - 1))
        assert sum(carried[wire]) == pytest.approx(expected, rel=0.02)
        assert tallied[wire] == pytest.approx(expected - message, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_pushes_of_every_type_add_up_to_what_was_to_be_pushed(wire, dtype):
    layout = ShardLayout.of([ParameterSpec(name="w", shape=(300,), dtype=dtype, group=0)])
    narrow, rest, arrived = NarrowMessages(layout, wire), None, torch.zeros(300, dtype=torch.float64)
    pushed = torch.linspace(-1, 1, 300).to(getattr(torch, dtype))
    message, received = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    for _ in range(50):
        flat_views(layout, message)[0].copy_(pushed)
        packed, rest = narrow.round(message, rest)
        narrow.write(packed, received)  # As servers do.
        arrived += flat_views(layout, received)[0]
    alike = narrow.round(message.clone(), rest)
    assert (arrived - 50 * pushed.double()).abs().max() < 0.01
    torch.set_default_dtype(torch.float64)  # That of the script's new tensors.
    try:
        assert all(map(torch.equal, narrow.round(message.clone(), rest), alike))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scheme", ["asp:period=3,wire=int8", "asp:period=3,wire=bf16"])
def test_a_change_with_a_nan_is_left_out_and_spoils_nothing_that_follows(tmp_path, scheme):
    run = Run(scheme=scheme, **UNEVEN)
    barrier = CONTEXT.Barrier(2)
    values = results(run_served(served_training.break_and_spoil_a_period, 2, run, barrier, run_dir=tmp_path))
    assert [value["skipped"] for value in values] == [0, 1]
    assert any("left out its change of iteration" in each for each in values[1]["warned"])
    assert np.isfinite(values[0]["ended"]).all()
    assert values[0]["ended"][1] == values[1]["ended"][1]


def test_a_worker_that_is_killed_loses_no_sample_of_others(tmp_path):
    run = Run(scheme="ssp:bound=1,period=3,wire=int8,servers=2", **UNEVEN)
    faults = {(2, "step"): served_faults.Kill()}
    outcomes = run_served(served_faults.train, 3, run, tmp_path, 1, faults, run_dir=tmp_path, servers=2, network=True)
    assert outcomes[1].exitcode == -9
    survivors = results([outcomes[0], outcomes[2]])
    assert survivors[0]["ended"] == survivors[1]["ended"]
    assert served_faults.pushed(tmp_path) == {epoch: list(range(run.samples)) for epoch in range(run.epochs)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: parse_scheme("asp:wire=int4"), "wire cannot be 'int4': use float32, bf16 or int8"),
        (
            lambda: Scheme(load=parse_scheme("bsp").load, served=Served(wire="int8")),
            "a narrow wire rounds those of each differently",
        ),
    ],
)
def test_what_a_narrow_wire_cannot_be_combined_with(make, says):
    with pytest.raises(ConfigError, match=says):
        make()

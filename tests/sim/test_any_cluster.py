"""What holds on any cluster."""

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.cluster import parse_cluster
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

SERVED = [
    "bsp:engine=server",
    "bsp:engine=server,load=lb-bsp",
    "ssp:bound=1,servers=2",
    "ssp:bound=2,exchange=overlapped",
    "dssp:lower=1,upper=3,load=dbs",
    "asp:load=lb-bsp:predictor=ema",
    "asp:exchange=overlapped",
]
COLLECTIVE = [
    "bsp",
    "lb-bsp",
    "lb-bsp:tuner=pairwise",
    "lb-bsp:micro_batch=3",
    "dbs",
    "local-sgd:period=3,load=lb-bsp",
]


@st.composite
def clusters(draw, spots):
    text = f"seed = {draw(st.integers(0, 99))}\n"
    text += '[links.l]\nbandwidth = "100 Mbit/s"\nlatency = "1 ms"\n[hosts.a]\nlink = "l"\n[hosts.b]\n'
    text += '[disturbances.noise]\nkind = "jitter"\nspread = "30 %"\n'
    text += '[spots.market]\nstays = "400 ms"\naway = "200 ms"\n'
    text += '[spots.late]\nrecorded = [["50 ms", "700 ms"], ["900 ms", "2 s"]]\n'
    workers = "[[workers]]\n" + 'device = "d0"\n'
    for number in range(draw(st.integers(1, 5))):
        text += f'[devices.d{number}]\nper_sample = "{draw(st.integers(1, 9))} ms"\n'
        text += f'fixed = "{draw(st.integers(0, 9))} ms"\n'
        workers += f'[[workers]]\ndevice = "d{number}"\n' + draw(st.sampled_from(["", 'disturb = ["noise"]\n']))
        workers += draw(st.sampled_from(["", 'host = "a"\n', 'host = "b"\n', 'link = "l"\n']))
        if spots:
            workers += draw(st.sampled_from(["", 'spot = "market"\n', 'spot = "late"\n']))
    return text + workers + draw(st.sampled_from(["", '[[servers]]\nhost = "a"\n[[servers]]\nhost = "b"\n']))


def scenario(data, schemes, spots):
    return Scenario(
        cluster=parse_cluster(data.draw(clusters(spots))),
        scheme=parse_scheme(data.draw(st.sampled_from(schemes))),
        global_batch_size=3 * data.draw(st.integers(6, 13)),
        iterations=data.draw(st.integers(1, 40)),
        epoch_samples=data.draw(st.one_of(st.none(), st.integers(1, 300))),
        message_bytes=data.draw(st.sampled_from([0, 20_000])),
        exchange_seconds=data.draw(st.sampled_from([0.0, 0.003])),
        ahead=data.draw(st.sampled_from([None, 2])),
    )


def check(case):
    result = simulate(case)
    assert result == simulate(case)
    assert result.complete  # One worker is always there.
    assert result.seconds > 0.0
    assert result.samples >= case.samples
    for worker in result.workers:
        parts = worker.compute_seconds + worker.wait_seconds + worker.idle_seconds
        parts += 0.0 if "overlapped" in case.scheme.name else worker.comm_seconds
        assert parts <= worker.present_seconds + 1e-6
        assert min(worker.compute_seconds, worker.wait_seconds, worker.comm_seconds, worker.idle_seconds) >= 0.0
    assert 0.0 <= result.waiting_share <= 1.0
    return result


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_run_without_servers_ends_with_every_sample_once(data):
    case = scenario(data, COLLECTIVE, spots=False)
    result = check(case)
    assert result.samples == case.samples == sum(worker.samples for worker in result.workers)
    # Behind a barrier all are slowest at some time, or wait.
    busiest = max(worker.compute_seconds for worker in result.workers)
    assert result.seconds >= busiest * (1 - 1e-9)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_a_run_on_servers_ends_with_every_sample_committed_within_its_bound(data):
    case = scenario(data, SERVED, spots=True)
    result = check(case)
    bounds = {"ssp:bound=1": 1, "ssp:bound=2": 2, "dssp": 3, "bsp": 0}
    for name, bound in bounds.items():
        if case.scheme.name.startswith(name):
            assert result.largest_lead <= bound

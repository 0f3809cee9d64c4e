"""Samples that cost differently: the mathematics of one process, each sample once, and workers of equal load."""

from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch
from support import habits, session_loops, training
from support.processes import results, run_workers
from support.recorded import by_worker
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep import ConfigError, EvenstepError
from evenstep.cluster import parse_cluster
from evenstep.report.overview import overview_of, values_of
from evenstep.report.page.tables import workers_table
from evenstep.report.recorded import read_run
from evenstep.schemes import Scheme, parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import JsonlRecorder, Silent
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("costs")]

# 3 workers x 5 = 15 a slice: 5 whole slices, and a last one of 2 that leaves a worker with nothing.
RUN = Run(samples=77, epochs=2)
COSTS = np.random.default_rng(1).lognormal(0, 1.5, 77)
SCHEMES = {
    "lb-bsp": {"scheme": "lb-bsp", "cost": COSTS.tolist()},
    "sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11)), "cost": COSTS},
    "padded": {
        "scheme": Scheme(name="scripted", load=Scripted(seed=12)),
        "cost": evenstep.Padded(COSTS.__getitem__, power=2),
    },
}
HABITS = (
    habits.accumulate_and_weigh,
    habits.accumulate_in_no_sync,
    habits.clip_the_norm,
    habits.normalise_batches,
    habits.schedule_and_average,
    habits.step_with_a_closure,
    habits.two_models_one_backward,
)


def everything():
    """On this worker: what each habit comes to, and whose samples and costs are whose in an epoch."""
    run = Run(scripted=21, samples=83, num_workers=2, epochs=2, options={"cost": CALLED})
    return {
        "habits": habits.together(HABITS, RUN, SCHEMES),
        "fetched": training.visit(run),
        "loads": loads("bsp"),
        "shares": shares(RUN),
        "per sample": per_sample(0.3),
        "unlike": habits.attempt(unlike, RUN, {}),
        "alone wrong": habits.attempt(one_is_wrong, RUN, {}),
    }


def CALLED(index):
    return 1 + index % 7


def loads(scheme):
    """What this worker's samples cost in each whole slice."""
    costs = np.random.default_rng(2).lognormal(0, 1, 640)
    model = training.model_of(RUN)
    dataset = TensorDataset(torch.zeros(640, training.FEATURES, dtype=torch.float64), torch.from_numpy(costs))
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, training.optimizer_of(RUN, model), loader, scheme=scheme, cost=costs
    )
    found = []
    for inputs, own in loader:
        model(inputs).sum().backward()
        optimizer.step()
        found.append((float(own.sum()), loader.current.cost * costs.mean()))
    loader.close()
    return found


def shares(run):
    """The positions of this worker and what they cost, in each slice, and the weights at the end."""
    with evenstep.Session("bsp", seed=run.seed) as session:
        model, optimizer = session_loops.prepared(run, session)
        own = session.shares(run.samples, session_loops.GLOBAL_BATCH, cost=COSTS)
        taken = []
        for _ in range(run.epochs):
            for share in own:
                training.step(model, optimizer, *session_loops.chosen(run, share))
                taken.append((share.positions[: share.samples].tolist(), share.cost))
        return taken, session_loops.weights(model)


def per_sample(part):
    """What is found in a run in which this part of an average sample's time does not depend on its cost.

    Also the latest worker's time over the mean in the last iterations.
    """
    costs = np.random.default_rng(2).lognormal(0, 1, 2304)
    model = training.model_of(RUN)
    dataset = TensorDataset(torch.zeros(2304, training.FEATURES, dtype=torch.float64))
    model, optimizer, loader = evenstep.prepare(
        model,
        training.optimizer_of(RUN, model),
        DataLoader(dataset, batch_size=16, shuffle=True),
        scheme="lb-bsp",
        cost=costs,
    )
    late = []
    for (inputs,) in loader:
        share = loader.current
        # So long that the real compute makes no difference.
        loader.engine.tracker.stopwatch.add(1000 * ((1 - part) * share.cost + part * share.samples))
        model(inputs).sum().backward()
        optimizer.step()
        loads = (1 - part) * share.loads.costs / 1000 + part * share.sizes
        late.append(loads.max() / loads.mean())
    loader.close()
    return share.loads.per_sample.thousandths / 1000, float(np.mean(late[-8:]))


def unlike(run, prepare):
    model, loader = training.model_of(run), habits.loader_of(run)
    costs = np.ones(run.samples)
    costs[0] += torch.distributed.get_rank() == 1
    prepare(model, habits.sgd(model), loader, cost=costs)


def one_is_wrong(run, prepare):
    model, loader = training.model_of(run), habits.loader_of(run)
    prepare(model, habits.sgd(model), loader, cost=[float(torch.distributed.get_rank())] * run.samples)


@pytest.fixture(scope="module")
def found():
    return results(run_workers(everything, habits.WORKERS))


@cache
def alone(habit):
    return habits.alone(habit, RUN)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_is_the_mathematics_of_one_process_whatever_the_costs(found, scheme, habit):
    for value in found:
        came_to = value["habits"][scheme, habit.__name__]
        assert not isinstance(came_to, str), came_to
        np.testing.assert_allclose(came_to, alone(habit), rtol=0, atol=1e-10)


def test_each_sample_once_with_data_workers_and_sizes_that_always_change(found):
    visits = [visit for value in found for visit in value["fetched"]["visits"]]
    for epoch in range(2):
        seen = [number for of_epoch, _, numbers, _, _ in visits if of_epoch == epoch for number in numbers]
        assert sorted(seen) == list(range(83))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1)])
def test_resumed_in_mid_epoch_on_another_number_of_workers(before, after):
    run = Run(scripted=24, samples=83, epochs=2, global_batch_size=12, options={"cost": COSTS.tolist() + [3.0] * 6})
    first = results(run_workers(training.visit_until, before, run, 4))
    state = first[0]["state"]
    second = (
        [training.visit(run, None, state)]
        if after == 1
        else results(run_workers(training.visit, after, run, None, state))
    )
    visits = [visit for value in [*first, *second] for visit in value["visits"]]
    for epoch in range(2):
        seen = [number for of_epoch, _, numbers, _, _ in visits if of_epoch == epoch for number in numbers]
        assert sorted(seen) == list(range(83))


def test_workers_get_equal_costs_and_are_told_them(found):
    for of_workers in zip(*(value["loads"] for value in found), strict=True):
        costs = [own for own, _ in of_workers]
        np.testing.assert_allclose(costs, np.mean(costs), rtol=0.02)
        np.testing.assert_allclose([told for _, told in of_workers], costs, rtol=1e-6)


def test_shares_are_of_equal_cost_and_the_mathematics_of_one_process(found):
    expected = session_loops.alone(session_loops.make_batches, RUN)
    for value in found:
        np.testing.assert_allclose(value["shares"][1], expected, rtol=0, atol=1e-10)
    slices = list(zip(*(value["shares"][0] for value in found), strict=True))
    for number, of_workers in enumerate(slices):
        first = number % 6 * 15
        assert sorted(each for own, _ in of_workers for each in own) == list(range(first, min(first + 15, 77)))
    # One sample may cost more than a third of all, and each worker gets two at least: the other is a small one.
    for of_workers in slices[:5]:
        costs = [cost for _, cost in of_workers]
        longest = max(COSTS[own].max() for own, _ in of_workers) / COSTS.mean()
        assert max(costs) <= max(1.1 * np.mean(costs), 1.01 * longest)


def test_what_samples_take_beside_their_cost_is_found_alike_on_all_workers(found):
    assert len({value["per sample"] for value in found}) == 1
    part, late = found[0]["per sample"]
    assert part == pytest.approx(0.3, abs=0.03)
    assert late < 1.03


def test_costs_that_differ_between_workers_are_refused_on_all(found):
    for value in found:
        assert value["unlike"].startswith("DisagreementError: worker 1 has costs of samples with the checksum ")
        assert "the cost of sample 0 is 0.0: give each sample a finite number above 0" in value["alone wrong"]


def test_a_simulation_shares_out_as_the_real_run_does(tmp_path):
    text = '[devices.d]\nper_sample = "2 ms"\n[[workers]]\ndevice = "d"\ncount = 3\n'
    lengths = np.random.default_rng(4).lognormal(0, 1, 12 * 24).tolist()
    scenario = Scenario(
        cluster=parse_cluster(text),
        scheme=parse_scheme("bsp"),
        global_batch_size=24,
        iterations=12,
        costs=lengths,
    )
    order = scenario.sample_costs().of_epoch(0).indices.tolist()
    results(run_workers(in_order, 3, tmp_path, text, lengths, order))
    folder = tmp_path / "simulated"
    with closing(Log(workers=[JsonlRecorder(folder, worker) for worker in range(3)], server=Silent())) as log:
        simulate(scenario, log=log)
    for both in zip(by_worker(tmp_path), by_worker(folder), strict=True):
        real, virtual = ([event for event in events if event.kind == "iteration"] for events in both)
        assert len(real) == 12
        assert [(event.cost, event.samples) for event in real] == [(event.cost, event.samples) for event in virtual]
        # A device is emulated by waiting, which ends no earlier.
        assert all(
            one.compute_seconds > 0.999 * other.compute_seconds for one, other in zip(real, virtual, strict=True)
        )


def in_order(run_dir, cluster, lengths, order):
    model, dataset = training.model_of(RUN), TensorDataset(torch.zeros(len(lengths), training.FEATURES).double())
    loader = DataLoader(dataset, batch_size=8, sampler=order)
    model, optimizer, loader = evenstep.prepare(
        model,
        training.optimizer_of(RUN, model),
        loader,
        scheme="bsp",
        cost=lengths,
        emulate=parse_cluster(cluster),
        run_dir=run_dir,
    )
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
    loader.close()


# Bad input, on one worker.


def refusal(cost, *, collate_fn=training.stacked, **options):
    model, dataset = torch.nn.Linear(2, 1), TensorDataset(torch.zeros(20, 2), torch.zeros(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate_fn)
    with pytest.raises(ConfigError) as caught:
        evenstep.prepare(model, optimizer, loader, cost=cost, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fails_late(index):
    return 1.0 if index < 3 else {}[index]


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (np.zeros(20), "the cost of sample 0 is 0.0"),
        ([1.0] * 19 + [-1.0], "the cost of sample 19 is -1.0"),
        (torch.full((20,), float("nan")), "the cost of sample 0 is nan"),
        (np.ones(19), "cost has 19 for a dataset of 20 samples"),
        (np.ones((20, 2)), "cost has 20x2 for a dataset of 20 samples"),
        ("tokens", "cost failed for sample 0 (TypeError: "),
        ([object()] * 20, "cost must be an array with one number for each sample"),
        (3, "cost has one number for a dataset of 20 samples"),
        (fails_late, "cost failed for sample 3 (KeyError: 3)"),
        (lambda index: "long", "cost failed for sample 0 (ValueError: "),
        (lambda index: 0, "the cost of sample 0 is 0.0"),
        (evenstep.Padded(np.ones(19)), "cost has 19 for a dataset of 20 samples"),
        (evenstep.Padded(np.ones(20), power=3), "the power of padded lengths is 1 or 2, not 3"),
    ],
)
def test_a_wrong_cost_is_refused_in_one_sentence(cost, said):
    assert said in refusal(cost)


def test_padded_lengths_without_a_collate_function_that_pads_are_refused_in_one_sentence():
    assert "give the loader a collate_fn that pads" in refusal(evenstep.Padded(np.ones(20)), collate_fn=None)


def test_shares_without_a_length_have_no_costs():
    model = torch.nn.Linear(2, 1)
    with evenstep.Session() as session:
        session.model(model)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        shares = iter(session.shares(None, 4, cost=np.ones(20)))
        with pytest.raises(ConfigError, match="give shares a length"):
            next(shares)


class Columns(torch.utils.data.Dataset):
    """As those of Hugging Face: fields of all samples by name."""

    column_names = ("length",)

    def __getitem__(self, key):
        return [3, 1, 2] if key == "length" else {"length": 1 + key % 3}

    def __len__(self):
        return 3


class Fields(Columns):
    column_names = ()

    def __getitem__(self, key):
        return {"length": [3, 1, 2][key]}


@pytest.mark.parametrize("dataset", [Columns(), Fields()])
def test_costs_are_a_field_of_the_samples(dataset):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=1)
    with evenstep.prepare(model, optimizer, loader, cost="length")[2] as prepared:
        assert [prepared.current.cost for _ in prepared] == [1.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scheme": "local-sgd"}, "leave out cost, or use another scheme, such as lb-bsp, dbs, bsp or asp"),
        ({"scheme": "lb-bsp:multiple=2"}, "multiple=2 rules most of them out"),
        ({"batch_sizes": [4]}, "batch sizes fix how many samples"),
    ],
)
def test_what_does_not_go_with_cost_is_refused_in_one_sentence(options, said):
    assert said in refusal(np.ones(20), **options)


def test_each_loader_of_a_session_has_its_own_costs():
    model = torch.nn.Linear(2, 1)
    dataset = TensorDataset(torch.zeros(8, 2))
    with evenstep.Session("lb-bsp") as session:
        prepared = session.model(model)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = session.loader(DataLoader(dataset, batch_size=4))
        costly = session.loader(DataLoader(dataset, batch_size=4), cost=[1.0, 1.0, 1.0, 5.0, 3.0, 3.0, 1.0, 1.0])
        for (one,), (other,) in zip(plain, costly, strict=True):
            prepared(one).sum().backward()
            assert plain.current.cost is None
            prepared(other).sum().backward()
            assert costly.current.cost == 4.0
        later = session.loader(DataLoader(dataset, batch_size=4), cost=np.ones(7))
        with pytest.raises(ConfigError, match="cost has 7 for a dataset of 8 samples"):
            next(iter(later))


def test_the_report_shows_what_each_worker_computed_and_what_of_it_was_padding(tmp_path):
    model, dataset = torch.nn.Linear(2, 1), TensorDataset(torch.zeros(8, 2))
    lengths = np.array([1.0, 3.0, 2.0, 2.0, 4.0, 4.0, 5.0, 3.0])
    padded = DataLoader(dataset, batch_size=2, collate_fn=training.stacked)
    with evenstep.Session("bsp", run_dir=tmp_path) as session:
        prepared = session.model(model)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (inputs,) in session.loader(padded, cost=evenstep.Padded(lengths)):
            prepared(inputs).sum().backward()
            optimizer.step()
    (worker,) = values_of(overview_of("a run", read_run(tmp_path)))["workers"]
    assert worker["cost"] * lengths.mean() == pytest.approx(6 + 4 + 8 + 10)
    assert worker["padding"] == pytest.approx(4 / 28)
    (shown,) = workers_table(overview_of("a run", read_run(tmp_path))).rows
    assert (shown["part of the cost"], shown["padding"]) == ("100.0%", "14.3%")


def test_a_device_holds_costs_and_not_samples(tmp_path):
    cluster = tmp_path / "cluster.toml"
    # 8 average samples of 100 MB, and 100 MB besides.
    cluster.write_text(
        '[devices.small]\nper_sample = "1 ms"\nmemory = "900 MB"\nmemory_fixed = "100 MB"\n'
        'memory_per_sample = "100 MB"\n\n[[workers]]\ndevice = "small"\n'
    )
    model, dataset = torch.nn.Linear(2, 1), TensorDataset(torch.zeros(12, 2))
    costs = np.array([1.0] * 6 + [3.0] * 6)
    with evenstep.Session("bsp", emulate=cluster) as session:
        prepared = session.model(model)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = iter(session.loader(DataLoader(dataset, batch_size=6), cost=costs))
        prepared(next(batches)[0]).sum().backward()
        with pytest.raises(
            EvenstepError, match="was given 9 samples of average cost but its emulated device holds at most 8"
        ):
            next(batches)

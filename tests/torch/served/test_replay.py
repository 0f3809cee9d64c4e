"""What real servers decided follows from what they wrote down of what reached them, by the same core."""

from collections import defaultdict
from itertools import chain

import numpy as np
import pytest
from support import served_ahead, served_training, training
from support.group_servers import run_grouped
from support.processes import results
from support.recorded import by_worker
from support.records import check_records
from support.served import run_served, server_events
from support.training import Run

from evenstep.cluster import parse_cluster
from evenstep.core.coordinate import Answer, Apply, Arrival, Coordinator, Given
from evenstep.core.samples import Costs
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.values import Problem
from evenstep.schemes import in_batches, parse_scheme

pytestmark = pytest.mark.multiprocess

SAMPLES = 640
# Far above the noise of a busy machine, which must not hide who is slow.
CLUSTER = """
[devices.fast]
per_sample = "4 ms"
[devices.slow]
per_sample = "16 ms"
[[workers]]
device = "slow"
[[workers]]
device = "fast"
disturb = ["noise"]
count = 2
[disturbances.noise]
kind = "jitter"
spread = "20 %"
"""


class Replay:
    """The events of server-0.jsonl fed to a coordinator: its answers to each worker, what becomes of its pushes.

    `costs`: a function that returns the costs of the positions of an epoch, if samples differ.
    """

    def __init__(self, run, events, costs=lambda epoch: None):
        self.costs = costs
        scheme = in_batches(parse_scheme(run.scheme), run.multiple)
        self.coordinator = Coordinator(
            sync=scheme.sync,
            load=scheme.load,
            problem=Problem(
                global_batch_size=run.global_batch_size,
                minimum=np.array(run.minimum),
                maximum=np.array(run.maximum),
                multiple=run.multiple,
            ),
            length=SAMPLES,
        )
        self.workers = run.workers
        self.positions, self.iterations, self.sizes = (defaultdict(list) for _ in range(3))
        self._pushed = {}
        for event in events:
            if event.kind in ("join", "begin", "push", "more", "rest", "stop", "leave"):
                self._carry_out(getattr(self, event.kind)(event))

    def join(self, event):
        self.coordinator.join(event.worker)
        return ()

    def begin(self, event):
        costs = self.costs(event.epoch)
        return self.coordinator.begin(event.worker, event.number, event.epoch, event.at, ahead=event.ahead, costs=costs)

    def push(self, event):
        worker = event.worker
        arrival = Arrival(
            key=(worker, 0, len(self.iterations[worker])), claim=event.claim, version=event.pulled,
            samples=event.samples, units=event.units, row=tuple(event.row),
        )  # fmt: skip
        self.iterations[worker].append({"row": event.row})
        self._pushed[worker] = self.iterations[worker][-1]
        return self.coordinator.push(arrival, event.at)

    def more(self, event):
        return self.coordinator.more(event.worker, event.ahead)

    def rest(self, event):
        return self.coordinator.rest(event.worker, event.at, done=event.done, ended=event.ended)

    def stop(self, event):
        return self.coordinator.stop(event.worker, event.at)

    def leave(self, event):
        return self.coordinator.leave(event.worker, event.at)

    def _carry_out(self, commands):
        for command in commands:
            if isinstance(command, Apply):
                for (worker, _, number), _ in command.pushes:
                    told = {"staleness": command.staleness, "behind": command.behind, "share": command.share}
                    self.iterations[worker][number] |= told
            elif isinstance(command, Answer):
                self._answer(command)
            elif isinstance(command, Given):
                self._given(command)

    def _given(self, command):
        self.positions[command.worker] += chain.from_iterable(claim.positions for claim in command.claims)

    def _answer(self, answer):
        pushed = self._pushed.pop(answer.worker, None)
        if pushed is not None and answer.release is not None:
            pushed |= {"lead": answer.release.lead, "bound": answer.release.bound}
        self._given(answer)
        known, sizes = self.sizes[answer.worker], self.coordinator.sizes.all()
        planned = [sizes.get(worker, 0) for worker in range(self.workers)]
        if not known or known[-1] != planned:
            known.append(planned)


SCHEMES = [
    "bsp:engine=server",
    "ssp:bound=2",
    "dssp:lower=1,upper=4,load=lb-bsp",
    "asp:load=lb-bsp",
    "asp:exchange=overlapped",
    "ssp:bound=1,period=2,steps=speed",
    "grouped:groups=0+2/1,across=ssp:bound=1,period=2,steps=speed",
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_coordinator_decides_alike_from_what_reached_it(scheme, tmp_path):
    run = Run(samples=SAMPLES, batch_size=16, epochs=2, scheme=scheme, options={"emulate": parse_cluster(CLUSTER)})
    replays(run, results(run_served(served_training.train, 3, run, run_dir=tmp_path)), tmp_path)


@pytest.mark.parametrize("scheme", ["ssp:bound=1,load=lb-bsp", "asp:exchange=overlapped"])
def test_the_coordinator_decides_alike_for_workers_that_fetch_ahead(scheme, tmp_path):
    run = Run(samples=SAMPLES, batch_size=16, epochs=2, scheme=scheme, options={"emulate": parse_cluster(CLUSTER)})
    replays(run, results(run_served(served_ahead.prefetch, 3, run, run_dir=tmp_path)), tmp_path)


def test_the_parent_decides_alike_for_workers_behind_a_group_server(tmp_path):
    scheme = "grouped:groups=0+2/1,inside=lb-bsp,across=ssp:bound=1"
    run = Run(samples=SAMPLES, batch_size=16, epochs=2, scheme=scheme, options={"emulate": parse_cluster(CLUSTER)})
    groups = [(0, 2), (1,)]
    values = results(run_grouped(served_training.train, groups, run, run_dir=tmp_path, behind=[0]))
    replays(run, values, tmp_path)


@pytest.mark.parametrize(
    "scheme", ["asp:load=lb-bsp", "ssp:bound=2", "bsp:engine=server", "grouped:groups=2,inside=lb-bsp"]
)
def test_the_coordinator_decides_alike_where_samples_differ_in_cost(scheme, tmp_path):
    lengths = np.random.default_rng(3).lognormal(0, 1, SAMPLES)
    options = {"emulate": parse_cluster(CLUSTER), "cost": lengths}
    run = Run(samples=SAMPLES, batch_size=16, epochs=2, scheme=scheme, options=options)
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path))
    costs = Costs.of(lengths, SAMPLES)

    def of_epoch(epoch):
        return PassCosts.of(costs.units[training.epoch_order(run, epoch)], costs.mean)

    replays(run, values, tmp_path, of_epoch)
    # What workers recorded is what their claims cost.
    for value, events in zip(values, by_worker(tmp_path), strict=True):
        recorded = [event.cost for event in events if event.kind == "iteration"]
        parts = [(epoch, part) for epoch, parts in enumerate(value["positions"]) for part in parts]
        cost = [
            costs.units[training.epoch_order(run, epoch)[part]].sum() * -(-events[0].minimum[0] // len(part))
            for epoch, part in parts
        ]
        np.testing.assert_allclose(recorded, np.array(cost) / costs.units.mean(), rtol=1e-9)


def replays(run, values, tmp_path, costs=lambda epoch: None):
    assert {"run", "plan", "iteration", "join", "push", "begin", "tally", "snapshot"} <= check_records(tmp_path)
    workers = by_worker(tmp_path)
    replay = Replay(workers[0][0], server_events(tmp_path), costs)
    for rank, (value, events) in enumerate(zip(values, workers, strict=True)):
        assert replay.positions[rank] == list(chain.from_iterable(chain.from_iterable(value["positions"])))
        iterations = [event for event in events if event.kind == "iteration"]
        assert len(iterations) > 5
        for replayed, recorded in zip(replay.iterations[rank], iterations, strict=True):
            assert replayed == {name: getattr(recorded, name) for name in replayed}
        planned = [event.batch_sizes for event in events if event.kind == "plan"]
        assert replay.sizes[rank][: len(planned)] == planned
        assert len(planned) > ("lb-bsp" in run.scheme)
    assert replay.coordinator.samples == 2 * SAMPLES

"""The plain-DDP baseline: what it computes is DDP's, and its hold counts what it could not emulate."""

from pathlib import Path

import pytest
import torch
from harness.baseline import DeviceHold, SlicedSampler, plain_loader
from support.faults import meeting_place
from support.started import Started, ended, script

from evenstep.cluster.slowness import AffineCurve, Chain, Device, From

pytestmark = pytest.mark.xdist_group("baseline")

WORKER = Path(__file__).with_name("baseline_worker.py")


class ManualClock:
    """Time that passes when it is told to, or waited for."""

    def __init__(self):
        self.now = 100.0
        self.waits = []

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def hold_on(clock, disturbance):
    return DeviceHold(disturbance=disturbance, worker=0, clock=clock, wait=clock.wait)


def iterate(hold, clock, batch_size, natural_seconds):
    began = clock.now
    hold.handed_out(batch_size)
    clock.now += natural_seconds
    hold.until_due()
    return clock.now - began


def test_the_hold_lasts_until_the_emulated_time_has_passed_since_the_batch_was_handed_out():
    clock = ManualClock()
    hold = hold_on(clock, Device(curve=AffineCurve(seconds_per_sample=0.25)))
    assert iterate(hold, clock, 4, natural_seconds=0.5) == 1.0
    clock.now += 10.0
    assert iterate(hold, clock, 8, natural_seconds=0.5) == 2.0
    assert clock.waits == [0.5, 1.5]
    assert (hold.iterations, hold.overruns) == (2, 0)


def test_real_work_longer_than_the_emulated_time_is_counted():
    clock = ManualClock()
    hold = hold_on(clock, Device(curve=AffineCurve(seconds_per_sample=0.25)))
    assert iterate(hold, clock, 2, natural_seconds=0.75) == 0.75
    assert iterate(hold, clock, 2, natural_seconds=0.5) == 0.5
    assert iterate(hold, clock, 2, natural_seconds=0.25) == 0.5
    assert (hold.iterations, hold.overruns) == (3, 1)


def test_disturbances_see_the_count_of_iterations():
    clock = ManualClock()
    device = Device(curve=AffineCurve(seconds_per_sample=0.25))
    hold = hold_on(clock, Chain(parts=(device, From(factor=3.0, first=1, until=2))))
    assert [iterate(hold, clock, 4, natural_seconds=0.5) for _ in range(3)] == [1.0, 3.0, 1.0]


def test_a_backward_without_a_batch_is_refused():
    clock = ManualClock()
    hold = hold_on(clock, Device(curve=AffineCurve(seconds_per_sample=0.25)))
    iterate(hold, clock, 4, natural_seconds=0.5)
    with pytest.raises(RuntimeError, match="handed_out"):
        hold.until_due()


def test_the_parts_of_all_workers_are_the_slices_of_the_epochs_order():
    sizes, length = [1, 3, 0, 2], 20
    samplers = [SlicedSampler(length=length, sizes=sizes, worker=worker, seed=5) for worker in range(4)]
    for sampler in samplers:
        sampler.set_epoch(2)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(7)).tolist()
    parts = list(zip(*samplers, strict=True))
    assert [[index for piece in part for index in piece] for part in parts] == [order[0:6], order[6:12], order[12:18]]
    assert all([len(each) for each in part] == sizes for part in parts)
    assert len(samplers[0]) == 3


def test_the_loader_gives_a_worker_its_part_in_order():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = plain_loader(data, sizes=[1, 2], worker=1, shuffle=False)
    assert [batch.tolist() for (batch,) in loader] == [[1, 2], [4, 5], [7, 8]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The weights after training in each way, of each of two workers."""
    folder = tmp_path_factory.mktemp("baseline")
    place = {**meeting_place(), "WORLD_SIZE": "2"}
    codes, said = ended(
        [Started(script, WORKER, folder, environment={**place, "RANK": str(rank)}) for rank in range(2)]
    )
    assert codes == [0, 0], said
    return [torch.load(folder / f"worker-{worker}.pt") for worker in range(2)]


@pytest.mark.multiprocess
def test_undisturbed_it_is_ddp_without_a_hook_bit_for_bit(weights):
    for each in weights:
        assert identical(each["baseline"], each["without hook"])


@pytest.mark.multiprocess
def test_it_takes_the_samples_that_evenstep_takes(weights):
    for each in weights:
        assert identical(each["baseline"], each["bsp"])
        assert identical(each["baseline by hand"], each["static"])


@pytest.mark.multiprocess
def test_other_sizes_with_their_weights_follow_the_same_trajectory(weights):
    for each in weights:
        assert not identical(each["baseline by hand"], each["baseline"])
        for name, value in each["baseline"].items():
            torch.testing.assert_close(each["baseline by hand"][name], value, rtol=1e-4, atol=1e-5)


def identical(these, those):
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)

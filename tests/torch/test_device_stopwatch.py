"""Compute and synchronisation on a device that works while its host goes ahead."""

import numpy as np
import pytest

from evenstep.core.samples import Share
from evenstep.core.values import UNLIMITED, Reports
from evenstep.torch.cuda import DeviceStopwatch
from evenstep.worker.iteration import Iteration


class Device:
    """A stream and its host in virtual time: work is launched at once, and done in its order."""

    def __init__(self):
        self.host = self.end = 0.0

    def launch(self, seconds):
        self.end = max(self.end, self.host) + seconds

    def wait_for_others(self, until):
        """A collective in the stream, which is over when the last worker has come and its bytes are here."""
        self.end = max(self.end, self.host, until)

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream):
        assert stream is self.device
        self.at = max(stream.end, stream.host)

    def synchronize(self):
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1000.0


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def stopwatch(device):
    return DeviceStopwatch(event=device.event, stream=lambda: device)


def iteration(device, stopwatch, *, compute, others_at, host_waits=0.0, samples=8):
    """One iteration of a script; its lap and its synchronisation are those of the one before."""
    stopwatch.restart()
    stopwatch.run()
    device.launch(compute)
    stopwatch.pause()
    device.wait_for_others(others_at)
    lap = stopwatch.lap(samples, 1)
    seconds = stopwatch.synchronised_seconds
    device.host += host_waits
    stopwatch.synchronised()
    device.launch(0.001)  # the optimizer
    return lap, seconds


def test_a_device_that_waits_for_a_straggler_shows_it_though_its_host_waits_for_nothing(device, stopwatch):
    assert iteration(device, stopwatch, compute=0.03, others_at=0.08) == (None, None)
    assert device.host == 0.0
    lap, synchronised = iteration(device, stopwatch, compute=0.03, others_at=0.2)
    assert (lap.samples, lap.compute_seconds) == (8, pytest.approx(0.03))
    assert synchronised == pytest.approx(0.05)


def test_compute_during_which_the_host_waits_is_no_synchronisation(device, stopwatch):
    # The host waits for the others' rows while its device computes; the others were there long before.
    iteration(device, stopwatch, compute=0.1, others_at=0.02, host_waits=0.09)
    lap, synchronised = iteration(device, stopwatch, compute=0.1, others_at=0.02, host_waits=0.09)
    assert (lap.compute_seconds, synchronised) == (pytest.approx(0.1), 0.0)


def test_a_mark_counts_from_the_last_stretch_of_compute_and_once(device, stopwatch):
    stopwatch.restart()
    stopwatch.synchronised()  # There is nothing to synchronise yet.
    for _ in range(2):  # Two backwards that synchronise.
        stopwatch.run()
        stopwatch.synchronised()  # Not while it computes.
        device.launch(0.02)
        stopwatch.pause()
        device.launch(0.01)
        stopwatch.synchronised()
    device.launch(0.5)
    stopwatch.synchronised()
    stopwatch.lap(8, 1)
    stopwatch.restart()
    lap = stopwatch.lap(8, 1)
    assert (lap.compute_seconds, stopwatch.synchronised_seconds) == (pytest.approx(0.04), pytest.approx(0.01))


def test_an_iteration_is_written_down_by_the_time_of_the_device_where_there_is_one():
    share = Share(iteration=3, positions=(), samples=8, sizes=np.array([8, 8]), ends_epoch=False)

    def parts(by_device):
        now = Iteration(
            number=3, epoch=0, share=share,
            piece=share, batch_sizes=[8], samples=8,
            load=8, passes=1, entered=0.0, input_seconds=0.0,
            synchronised_seconds=0.09, device_synchronised_seconds=by_device,
        )  # fmt: skip
        columns = np.full((2, Reports.columns()), UNLIMITED, dtype=np.int64)
        columns[:, 1] = 30_000, 70_000  # microseconds of compute
        event = now.event(Reports.from_table(columns), 0, 0.2)
        return [round(getattr(event, f"{part}_seconds"), 6) for part in ("compute", "wait", "comm")]

    assert parts(None) == [0.03, 0.04, 0.05]
    assert parts(0.045) == [0.03, 0.04, 0.005]
    assert parts(0.0) == [0.03, 0.0, 0.0]

"""The driving factors: on files like the kernel's, and with real competitors, quotas and pinned cores."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from evenstep.core.values import Factors
from evenstep.torch.factors import sampler_of
from evenstep.worker.factors import factor_sampler
from evenstep.worker.factors.control_groups import group_folders
from evenstep.worker.factors.cores import Cores, share_left, usable_cores
from evenstep.worker.factors.cpu import CpuAvailability
from evenstep.worker.factors.gpu import GpuAvailability, GpuShares
from evenstep.worker.factors.memory import MemoryAvailability
from evenstep.worker.factors.quota import CpuQuota
from evenstep.worker.factors.run_queue import RunQueue
from evenstep.worker.factors.spaced import Spaced

ATTEMPTS = 12
PATIENCE_SECONDS = 6.0
"""Other processes of the machine may disturb a test; so often and so long it looks for an undisturbed stretch."""

needs_record = pytest.mark.skipif(
    RunQueue(Path("/")).recent_share() is None, reason="this kernel does not show /proc/thread-self/sched"
)
needs_two_cores = pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


# Arithmetic.


@pytest.mark.parametrize(
    ("cores", "threads", "others", "share"),
    [
        (1, 1, 0.0, 1.0),
        (1, 1, 0.3, 0.7),
        (1, 1, 0.5, 0.5),  # a competitor beside a thread that computes
        (1, 1, 1.0, 0.5),  # and beside one that waits
        (4, 4, 1.0, 0.75),
        (4, 4, 4.0, 0.5),
        (4, 1, 3.0, 1.0),  # three neighbours leave a core
        (4, 1, 4.0, 0.8),
        (2, 8, 1.0, 0.5),  # more threads than cores want the cores
    ],
)
def test_share_left(cores, threads, others, share):
    assert share_left(cores=cores, threads=threads, others=others) == pytest.approx(share)


def test_a_reading_is_kept_until_it_is_due():
    clock, taken = Clock(), []
    spaced = Spaced(lambda: taken.append(clock.now) or len(taken), seconds=0.5, clock=clock)
    values = []
    for _ in range(11):
        values.append(spaced.value())
        clock.now += 0.125
    assert values == [1] * 4 + [2] * 4 + [3] * 3


def test_a_slow_reading_is_taken_seldom():
    clock, taken = Clock(), []

    def read():
        taken.append(clock.now)
        clock.now += 0.002

    spaced = Spaced(read, seconds=0.1, clock=clock, processor_time=clock)
    for _ in range(40):
        spaced.value()
        clock.now += 0.1
    assert taken == [100.0, pytest.approx(102.0, abs=0.15)]


# Files like the kernel's.


def write(root, path, text):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def version_1(root, group="/job/task"):
    write(root, "proc/self/cgroup", f"3:memory:{group}\n2:cpu,cpuacct:{group}\n0::/elsewhere\n")
    write(
        root,
        "proc/self/mountinfo",
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "31 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
        "32 23 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 23 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )


def version_1_quota(root, group, quota, period=100_000):
    write(root, f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us", f"{quota}\n")
    write(root, f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us", f"{period}\n")


def version_2(root, *, group="/", mounted="/"):
    write(root, "proc/self/cgroup", f"0::{group}\n")
    write(root, "proc/self/mountinfo", f"31 23 0:28 {mounted} /sys/fs/cgroup rw - cgroup2 cgroup rw\n")


def test_the_tightest_quota_on_the_path_counts(tmp_path):
    version_1(tmp_path)
    version_1_quota(tmp_path, "", -1)
    version_1_quota(tmp_path, "job", 150_000)
    version_1_quota(tmp_path, "job/task", 200_000)
    version_1_quota(tmp_path, "job/other", 1_000)
    quota = CpuQuota(tmp_path, clock=Clock())
    assert quota.cores() == 1.5
    quota.close()


def test_a_changed_quota_shows_at_once(tmp_path):
    version_2(tmp_path)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    quota = CpuQuota(tmp_path, clock=Clock())
    assert quota.cores() == math.inf
    write(tmp_path, "sys/fs/cgroup/cpu.max", "5000 10000\n")
    assert quota.cores() == 0.5
    quota.close()


def test_a_container_sees_its_part_of_the_tree(tmp_path):
    version_2(tmp_path, group="/docker/1/inner", mounted="/docker/1")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "300000 100000\n")
    write(tmp_path, "sys/fs/cgroup/inner/cpu.max", "max 100000\n")
    quota = CpuQuota(tmp_path, clock=Clock())
    assert quota.cores() == 3.0
    quota.close()


def test_a_process_that_is_moved_meets_the_quota_of_its_new_group(tmp_path):
    clock = Clock()
    version_1(tmp_path)
    version_1_quota(tmp_path, "job", 25_000)
    version_1_quota(tmp_path, "new", 75_000)
    quota = CpuQuota(tmp_path, clock=clock)
    assert quota.cores() == 0.25
    write(tmp_path, "proc/self/cgroup", "2:cpu,cpuacct:/new\n")
    clock.now += 11.0
    assert quota.cores() == 0.75
    quota.close()


def test_memory_is_the_machines_or_the_groups_whichever_is_tighter(tmp_path):
    clock = Clock()
    write(tmp_path, "proc/meminfo", "MemTotal:  4000 kB\nMemFree: 5 kB\nMemAvailable:  3000 kB\n")
    version_2(tmp_path, group="/job")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "1\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 1\n")
    memory = MemoryAvailability(tmp_path, clock=clock)
    assert memory.read() == 0.75
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1000\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "900\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 700\ninactive_file 200\nactive_file 0\n")
    assert memory.read() == 0.75  # It is not looked at in every iteration.
    memory.close()
    memory = MemoryAvailability(tmp_path, clock=clock)
    assert memory.read() == pytest.approx(0.3)
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "1200\n")
    clock.now += 5.0
    assert memory.read() == 0.0
    memory.close()


def test_a_memory_limit_of_version_1_beyond_the_machine_is_none(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 1000 kB\n")
    version_1(tmp_path)
    for group, limit in (("", 2**63 - 4096), ("job", 2_000_000)):
        write(tmp_path, f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        write(tmp_path, f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", "1900000\n")
        write(tmp_path, f"sys/fs/cgroup/memory/{group}/memory.stat", "inactive_file 5\ntotal_inactive_file 100000\n")
    memory = MemoryAvailability(tmp_path, clock=Clock())
    assert memory.read() == pytest.approx(0.1)
    memory.close()


def stat(root, cores):
    lines = [f"cpu{core} {user} 0 {system} {idle} 0 0 0 {steal} 0 0" for core, user, system, idle, steal in cores]
    write(root, "proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2 3", "cpu9 garbage"]) + "\n")


def test_what_others_took_of_the_usable_cores_alone_counts(tmp_path):
    clock, own = Clock(), iter([5.0, 5.2])
    stat(tmp_path, [(0, 100, 50, 900, 0), (2, 10, 10, 10, 0), (3, 10, 10, 10, 0)])
    cores = Cores(tmp_path, threads=2, clock=clock, own=lambda: next(own), usable=lambda: frozenset({2, 3}))
    assert cores.read() == (None, 0.0)
    clock.now += 1.0
    stat(tmp_path, [(0, 200, 50, 900, 0), (2, 30, 20, 80, 0), (3, 40, 30, 60, 0)])
    # Busy for 0.3 and 0.5 s, 0.2 s of it this process's own: 0.6 of two cores.
    assert cores.read() == (pytest.approx(0.7), 0.0)
    cores.close()


def test_time_stolen_by_the_host_is_averaged_over_a_second(tmp_path):
    clock = Clock()
    stat(tmp_path, [(0, 0, 0, 0, 0)])
    cores = Cores(tmp_path, threads=1, clock=clock, own=lambda: 0.0, usable=lambda: frozenset({0}))
    stolen = [cores.read()[1]]
    for tenth in range(1, 31):
        clock.now += 0.1
        stat(tmp_path, [(0, 6 * tenth, 0, 0, 4 * tenth)])
        stolen.append(cores.read()[1])
    assert stolen == sorted(stolen)
    assert stolen[1] < 0.05
    assert stolen[-1] == pytest.approx(0.4, abs=0.03)
    cores.close()


def sched(root, running, runnable, ran=0, queued=0):
    write(
        root,
        "proc/thread-self/sched",
        f"python (1, #threads: 1)\n{'-' * 20}\nse.avg.util_avg   :  {running}\nse.avg.runnable_avg :  {runnable}\n",
    )
    write(root, "proc/thread-self/schedstat", f"{ran} {queued} 7\n")


def test_the_schedulers_averages_of_a_thread_that_ran_lately(tmp_path):
    sched(tmp_path, 300, 900)
    queue = RunQueue(tmp_path)
    assert queue.recent_share() == pytest.approx(1 / 3)
    sched(tmp_path, 30, 90)
    assert queue.recent_share() is None
    queue.close()


def test_the_mean_share_waits_for_enough_time(tmp_path):
    sched(tmp_path, 0, 0, ran=10**9, queued=10**9)
    queue = RunQueue(tmp_path)
    assert queue.mean_share() is None
    means = []
    for ran, queued in ((20, 0), (40, 10), (60, 10), (120, 40)):
        sched(tmp_path, 0, 0, ran=10**9 + ran * 10**6, queued=10**9 + queued * 10**6)
        means.append(queue.mean_share())
    assert means == [None, pytest.approx(0.8), pytest.approx(0.8), pytest.approx(80 / 110)]
    queue.close()


def test_a_new_quota_bounds_at_once_and_an_old_one_with_what_was_felt(tmp_path):
    version_2(tmp_path)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    sched(tmp_path, 900, 1000)
    cpu = CpuAvailability(tmp_path, threads=1, clock=Clock())
    assert cpu.read() == pytest.approx(0.9)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "60000 100000\n")
    sched(tmp_path, 900, 1000, ran=100_000_000, queued=25_000_000)
    assert cpu.read() == pytest.approx(0.6)
    sched(tmp_path, 900, 1000, ran=130_000_000, queued=95_000_000)
    assert cpu.read() == pytest.approx(0.3)  # Others use up the group's quota.
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert cpu.read() == pytest.approx(0.9)
    cpu.close()


def test_where_nothing_can_be_read_psutil_is_asked_and_nothing_is_limited(tmp_path):
    sampler = factor_sampler(time.perf_counter, threads=1, root=tmp_path)
    factors = sampler.sample()
    assert factors.cpu_availability == 1.0
    assert 0.0 < factors.memory_availability < 1.0
    assert (factors.gpu_availability, factors.gpu_memory_availability) == (1.0, 1.0)
    clock_passed = time.process_time() + 0.15
    while time.process_time() < clock_passed:
        pass
    assert 0.0 < sampler.sample().cpu_availability <= 1.0
    sampler.close()


# A real machine.

BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    os.write(1, b".")
"""


class Hog:
    """A process that takes all it can get of one core."""

    def __init__(self, core):
        self._process = subprocess.Popen([sys.executable, "-c", BURN, str(core)], stdout=subprocess.PIPE)
        self.wait(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def wait(self, seconds):
        """Block until it has burnt so much processor time from now on (in steps of 50 ms)."""
        os.set_blocking(self._process.stdout.fileno(), False)
        self._process.stdout.read()
        os.set_blocking(self._process.stdout.fileno(), True)
        for _ in range(round(seconds / 0.05) + 1):
            assert os.read(self._process.stdout.fileno(), 1)
        return True


@pytest.fixture
def group():
    """A control group of version 1 that this process is in, where it can make one; else None.

    It weighs far more than all others, so that a busy machine does not disturb what happens in it.
    """
    membership = Path("/proc/self/cgroup").read_text() if sys.platform == "linux" else ""
    present = [each for each in group_folders(Path("/"), "cpu", membership) if (each / "cpu.cfs_quota_us").exists()]
    if not present or not os.access(present[0] / "cgroup.procs", os.W_OK):
        yield None
        return
    own, folder = present[0], present[0] / f"evenstep-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cpu.shares").write_text(str(2**18))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield folder
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


@pytest.fixture
def pinned(group):
    """(the core that this test computes on, another one)."""
    before = os.sched_getaffinity(0)
    *_, other, core = sorted(before)
    os.sched_setaffinity(0, {core})
    yield core, other
    os.sched_setaffinity(0, before)


@pytest.fixture
def sampler():
    sampler = factor_sampler(time.perf_counter, threads=1)
    yield sampler
    sampler.close()


def compute(seconds):
    """Compute for so much processor time; the share of the core that it got."""
    began, until = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return seconds / (time.perf_counter() - began)


def nothing():
    return True


def shows(sampler, low, high, *, got, wait=nothing):
    """Whether it reads `low` to `high` after computing and `wait`, where computing gets about the share `got`.

    Stretches are disturbed, and do not count, where `wait` says so or computing, before and after, gets another share.
    """
    seen, until = [], time.monotonic() + PATIENCE_SECONDS
    for _ in range(ATTEMPTS):
        if time.monotonic() > until:
            break
        before = compute(0.1)
        undisturbed = wait()
        reading = sampler.sample().cpu_availability
        after = compute(0.02) if wait is nothing else compute(0.1)
        if not undisturbed or abs(before - got) > 0.06 or abs(after - got) > 0.12:
            continue
        if low <= reading <= high:
            return True
        seen.append(reading)
    if seen:
        pytest.fail(f"none of {seen} lies between {low} and {high}")
    return pytest.skip(f"other processes keep this machine too busy to see a worker that gets {got:.2f} of its core")


@pytest.mark.alone
@pytest.mark.multiprocess
@needs_record
@needs_two_cores
def test_a_worker_without_a_competitor_can_have_its_core_computing_or_waiting(pinned, sampler):
    core, other = pinned

    def wait_alone():
        idle, began = psutil.cpu_times(percpu=True)[core].idle, time.monotonic()
        elsewhere.wait(0.2)
        return psutil.cpu_times(percpu=True)[core].idle - idle > 0.9 * (time.monotonic() - began)

    with Hog(other) as elsewhere:  # Which its core does not feel.
        assert shows(sampler, 0.93, 1.0, got=1.0)
        assert shows(sampler, 0.9, 1.0, got=1.0, wait=wait_alone)


@pytest.mark.alone
@pytest.mark.multiprocess
@needs_record
@needs_two_cores
def test_a_competitor_leaves_half_of_a_core_computing_or_waiting(pinned, sampler):
    core, _ = pinned
    with Hog(core) as hog:
        assert shows(sampler, 0.42, 0.58, got=0.5)
        assert shows(sampler, 0.47, 0.58, got=0.5, wait=lambda: hog.wait(0.2))


@pytest.mark.alone
@pytest.mark.multiprocess
@needs_record
@needs_two_cores
def test_two_competitors_leave_a_third(pinned, sampler):
    core, _ = pinned
    with Hog(core), Hog(core):
        assert shows(sampler, 0.27, 0.4, got=1 / 3)


@pytest.mark.alone
@pytest.mark.multiprocess
@needs_record
@needs_two_cores
def test_a_competitor_that_came_late_shows_in_full(pinned, sampler):
    core, _ = pinned
    queue, seen = RunQueue(Path("/")), []
    for _ in range(ATTEMPTS):
        queue.mean_share()
        alone = compute(0.3)
        with Hog(core):
            compute(0.12)
            leads, mean = sampler.sample().cpu_availability, queue.mean_share()
        if alone < 0.9:
            continue
        if mean - leads > 0.15 and 0.4 < leads < 0.6:
            break
        seen.append((leads, mean))
    else:
        assert not seen, f"readings with means: {seen}"
        pytest.skip("other processes keep this machine too busy")
    queue.close()


@pytest.mark.alone
@pytest.mark.multiprocess
@needs_record
@needs_two_cores
def test_a_real_quota_shows_and_ends(pinned, sampler, group):
    if group is None:
        pytest.skip("needs root and a writable control group of version 1 for cpu")
    (group / "cpu.cfs_period_us").write_text("10000")
    assert shows(sampler, 0.93, 1.0, got=1.0)
    (group / "cpu.cfs_quota_us").write_text("4000")
    compute(0.06)
    assert sampler.sample().cpu_availability <= 0.4
    assert shows(sampler, 0.3, 0.4, got=0.4)
    (group / "cpu.cfs_quota_us").write_text("-1")
    assert shows(sampler, 0.93, 1.0, got=1.0)


# A GPU's library that is not there, that finds no driver, and that answers.

LIBRARY = """
from types import SimpleNamespace
import os

class NVMLError(Exception):
    pass

open_, since, others, mine = 0, [], 30, os.getpid()

def nvmlInit():
    global open_
    if fails:
        raise NVMLError
    open_ += 1

def nvmlShutdown():
    global open_
    open_ -= 1

def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "GPU-7":
        raise NVMLError
    return 7

def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=mine), SimpleNamespace(pid=1)]

def nvmlDeviceGetProcessUtilization(handle, timestamp):
    since.append(timestamp)
    return [
        SimpleNamespace(pid=1, timeStamp=20, smUtil=others),
        SimpleNamespace(pid=1, timeStamp=10, smUtil=99),
        SimpleNamespace(pid=mine, timeStamp=30, smUtil=60),
    ]

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(free=3, used=1, total=4)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes `pynvml` a module of the given text, or of none that can be imported."""

    def install(text):
        (tmp_path / "pynvml.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    yield install
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize("text", ["raise ImportError", "fails = True" + LIBRARY])
def test_without_a_working_library_a_gpu_counts_as_free(library, text):
    library(text)
    gpu = GpuAvailability("GPU-7", clock=Clock())
    assert gpu.read() == GpuShares(time=1.0, memory=1.0)
    gpu.close()


def test_a_gpu_that_the_library_does_not_know_counts_as_free(library):
    library("fails = False" + LIBRARY)
    gpu = GpuAvailability("GPU-8", clock=Clock())
    assert gpu.read() == GpuShares()
    assert sys.modules["pynvml"].open_ == 0


def test_the_utilisation_of_other_processes_is_what_a_gpu_does_not_have(library):
    library("fails = False" + LIBRARY)
    clock = Clock()
    gpu = GpuAvailability("GPU-7", clock=clock)
    nvml = sys.modules["pynvml"]
    assert gpu.read() == GpuShares(time=pytest.approx(0.7), memory=0.75)
    nvml.others = 100
    clock.now += 1.0
    assert gpu.read() == GpuShares(time=0.5, memory=0.75)
    assert nvml.since == [0, 30]
    nvml.mine = -1  # The driver numbers processes otherwise than this machine does.
    clock.now += 1.0
    assert gpu.read() == GpuShares(time=1.0, memory=0.75)
    gpu.close()
    assert nvml.open_ == 0


def test_a_worker_on_a_gpu_samples_it(library, monkeypatch):
    library("fails = False" + LIBRARY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7"))
    sampler = sampler_of(torch.device("cuda", 0), time.perf_counter)
    factors = sampler.sample()
    assert isinstance(factors, Factors)
    assert (factors.gpu_availability, factors.gpu_memory_availability) == (pytest.approx(0.7), 0.75)
    sampler.close()

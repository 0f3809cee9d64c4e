"""The driving factors: on files like the kernel's, and with a real competitor and a real quota."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from evenstep.worker.factors import FactorSampler, share_left, usable_cores

ATTEMPTS = 12
"""Other processes of the machine may disturb a test; so often it looks for an undisturbed stretch."""


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


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
        (2, 8, 0.0, 1.0),
    ],
)
def test_the_share_is_what_others_leave_and_at_least_the_fair_one(cores, threads, others, share):
    assert share_left(cores=cores, threads=threads, others=others) == pytest.approx(share)


def quotas(root, version, path, *groups):
    """A folder like the machine's, with a process in the group `path` and a quota in each of these groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{path}\n" if version == 2 else f"3:memory:/\n4:cpu,cpuacct:{path}\n")
    for group, quota, period in groups:
        folder = root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / group
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text("-1\n" if quota == "max" else f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    return FactorSampler(threads=1, clock=Clock(), root=root)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_quota_on_the_path_bounds_the_share(tmp_path, version):
    sampler = quotas(tmp_path, version, "/a/b", ("", "max", 100000), ("a", 25000, 100000), ("a/b", 50000, 100000))
    assert sampler.sample().cpu_availability == 0.25


@pytest.mark.parametrize("version", [1, 2])
def test_a_change_of_the_quota_shows_at_once_and_none_is_no_limit(tmp_path, version):
    sampler = quotas(tmp_path, version, "/a", ("a", "max", 100000))
    assert sampler.sample().cpu_availability == 1.0
    file = "cpu.max" if version == 2 else "cpu/a/cpu.cfs_quota_us"
    path = tmp_path / "sys/fs/cgroup" / (f"a/{file}" if version == 2 else file)
    path.write_text("40000 100000\n" if version == 2 else "40000\n")
    assert sampler.sample().cpu_availability == 0.4
    path.unlink()
    assert sampler.sample().cpu_availability == 1.0


def test_without_the_kernels_files_nothing_is_limited(tmp_path):
    assert FactorSampler(threads=1, clock=Clock(), root=tmp_path).sample().cpu_availability == 1.0


def test_memory_is_what_psutil_says_and_is_kept_for_four_seconds(monkeypatch):
    clock = Clock()
    sampler = FactorSampler(threads=1, clock=clock)
    memory = psutil.virtual_memory()
    first = sampler.sample().memory_availability
    assert first == pytest.approx(memory.available / memory.total, abs=0.1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=memory.total // 4))
    clock.now += 3.9
    assert sampler.sample().memory_availability == first
    clock.now += 0.2
    assert sampler.sample().memory_availability == pytest.approx(0.25, abs=1e-6)


@contextmanager
def hog(core):
    """Another process that computes on this core without end."""
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def pinned():
    """The core that this test computes on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield max(before)
    os.sched_setaffinity(0, before)


def compute(seconds):
    """Compute for so much processor time; the share of the core that it got."""
    began, until = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return seconds / (time.perf_counter() - began)


def reading(sampler, got):
    """What it reads after a stretch of computing that got about this share; None where there was none."""
    for _ in range(ATTEMPTS):
        compute(0.02)
        sampler.sample()
        if abs(compute(0.15) - got) < 0.06:
            return sampler.sample().cpu_availability
    return None


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_competitor_on_its_core_leaves_half_of_it(pinned):
    sampler = FactorSampler(threads=1, clock=time.perf_counter)
    assert usable_cores() == {pinned}
    alone = reading(sampler, 1.0)
    with hog(pinned):
        beside = reading(sampler, 0.5)
    if alone is None or beside is None:
        pytest.skip("other processes keep this machine too busy")
    assert alone > 0.85
    assert 0.4 < beside < 0.62


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_real_quota_shows_and_ends():
    own = Path("/sys/fs/cgroup/cpu") / next(
        (line.split(":", 2)[2].lstrip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()
         if "cpu" in line.split(":", 2)[1].split(",")),
        "absent",
    )  # fmt: skip
    if os.geteuid() or not (own / "cpu.cfs_quota_us").exists():
        pytest.skip("needs root and a writable control group of version 1 for cpu")
    folder = own / f"evenstep-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        sampler = FactorSampler(threads=1, clock=time.perf_counter)
        assert sampler.sample().cpu_availability == 1.0
        (folder / "cpu.cfs_quota_us").write_text("40000")
        assert sampler.sample().cpu_availability <= 0.4
        (folder / "cpu.cfs_quota_us").write_text("-1")
        assert sampler.sample().cpu_availability > 0.4
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()

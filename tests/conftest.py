"""What every test gets: reproducible hypothesis examples, and a look at what it left behind."""

import gc
import multiprocessing
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell; what tests start and interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For the scripts that tests start: in this process pytest sees to it.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# As under torchrun. Threads that spin while another test has their core take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")

# multiprocessing keeps these two for the rest of the process, however many tests use them.
LASTING_CHILDREN = ("multiprocessing.forkserver import main", "resource_tracker import main")
# pytest's own, and those that libraries set once for the process: scikit-learn and JAX when they are imported, DDP at
# its first model.
LASTING_VARIABLES = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "TF_", "TPU_")
GRACE_SECONDS = 20.0

TESTS = Path(__file__).parent
GROUPS = {}
"""The group of each file that is in one."""


class Groups(LoadScopeScheduling):
    """Runs the files of an `xdist_group` in one process, as `loadgroup` of xdist 3.8 does not under pytest 9.2."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        return GROUPS.get(path, nodeid)


def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") == "loadgroup":
        found = ((path, re.search(r"xdist_group\(\"(\w+)\"\)", path.read_text())) for path in TESTS.rglob("test_*.py"))
        GROUPS.update({path.relative_to(TESTS.parent).as_posix(): group[1] for path, group in found if group})
        return Groups(config, log)
    return None


def pytest_addoption(parser):
    parser.addoption("--all-faults", action="store_true", help="every cell of the grid in tests/faults, not a part")
    parser.addoption("--fault-table", type=Path, help="a file for the table of the cells of tests/faults that were run")


def pytest_terminal_summary(terminalreporter, config):
    """Write the table of the faults that were tried, once all of them came out as they must."""
    path = config.getoption("fault_table")
    if path is None or hasattr(config, "workerinput"):  # One of several processes that run the tests.
        return
    from faults import table

    passed = terminalreporter.stats.get("passed", [])
    rows = [cell for report in passed if report.when == "call" and (cell := dict(report.user_properties).get("cell"))]
    if any(terminalreporter.stats.get(outcome) for outcome in ("failed", "error")):
        terminalreporter.write_line(f"{path} is not written, since not every cell came out as it must")
    elif rows:
        table.write(path, sorted(rows, key=lambda row: [str(each) for each in row[:4]]))


def pytest_ignore_collect(collection_path, config):
    """Collect test files only: the search for doctests would import, and so run, the scripts that tests launch.

    To import them takes longer than some of the few tests that run alone, so then only their files are collected.
    """
    if collection_path.suffix != ".py":
        return None
    is_test = collection_path.name.startswith("test_")
    if not is_test or (config.option.markexpr == "alone" and "mark.alone" not in collection_path.read_text()):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without searches for garbage: imports leave none, and each search looks through all that they brought."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """Fail a test that leaves processes, environment variables or a process group; clean up for the next one."""
    variables = environment()
    processes = descendants()
    yield
    left = [
        *process_groups_left(),
        *variables_changed(variables),
        *processes_left(processes),
    ]
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(LASTING_VARIABLES)}


def variables_changed(before):
    after = environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed]


def descendants():
    """Every process below this one but multiprocessing's lasting two; what the fork server forked is included."""
    children = {process for process in map(found, children_of(os.getpid())) if process is not None}
    lasting = {child for child in children if is_lasting(child)}
    below, looked = set(children), list(children)
    while looked:
        further = {process for process in map(found, children_of(looked.pop().pid)) if process is not None} - below
        below |= further
        looked += further
    return below - lasting


def children_of(pid):
    """From the kernel's own lists: psutil would look through all of the machine's processes, twice for each test."""
    pids = []
    with suppress(OSError):  # It, or a thread of its, has ended meanwhile.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (thread / "children").read_text().split())
    return pids


def found(pid):
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def is_lasting(process):
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(entry in command for entry in LASTING_CHILDREN)


def processes_left(before):
    multiprocessing.active_children()  # reaps the finished ones that nobody joined
    if not (descendants() - before):
        return []
    _, alive = psutil.wait_procs(descendants() - before, timeout=GRACE_SECONDS)
    left = [describe(process) for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    return left


def describe(process):
    try:
        return f"process {process.pid} ({' '.join(process.cmdline()) or process.name()})"
    except psutil.Error:
        return f"process {process.pid}"


def process_groups_left():
    torch = sys.modules.get("torch")  # never imported for the sake of this check
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    torch.distributed.destroy_process_group()
    return ["a torch.distributed process group"]

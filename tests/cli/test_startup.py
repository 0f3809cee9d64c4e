"""What a start imports beside PyTorch, counted: seconds depend on the machine (`benchmarks/startup.py` has them)."""

import json
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS

# Most of a start is imports: these modules of ours take about 1 ms each.
MOST_OF_LAUNCHER, MOST_OF_WORKER = 100, 199
OTHERS = {"evenstep", "msgspec", "numpy", "psutil", "torch"}

IMPORTS = """
import json, sys

def news(before):
    return sorted(set(sys.modules) - before)

import torch.distributed.run, torch.distributed.launcher.api
before = set(sys.modules)
import evenstep.cli.main, evenstep.cli.run, evenstep.launch.launch
launcher = news(before)
import torch.utils.data
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)  # It brings in the compiler, as in any script.
before = set(sys.modules) - set(launcher)
import evenstep
evenstep.prepare
from evenstep.torch.running import Running
worker = news(before)
print(json.dumps({"launcher": launcher, "worker": worker}))
"""

# The script does not exist, so the command ends once it has imported the launcher.
COLLECTIONS = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, info: phase == "start" and info["generation"] == 2 and full.append(1))
from evenstep.cli.main import main
code = main(["run", "--workers", "1", "no such script.py"])
assert code == 2 and "torch.distributed.run" in sys.modules
print(len(full), gc.isenabled())
"""


@pytest.fixture(scope="module")
def imported():
    command = (sys.executable, "-c", IMPORTS)
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=GUARD_SECONDS).stdout)


def ours(modules):
    return [name for name in modules if name.split(".")[0] == "evenstep"]


def test_the_launcher_imports_what_starts_workers(imported):
    known = set(ours(imported["launcher"]))
    assert len(known) <= MOST_OF_LAUNCHER
    rooms = {name.split(".")[1] for name in known if "." in name}
    assert rooms == {"cli", "cluster", "core", "launch", "schemes", "telemetry"}


def test_a_worker_imports_what_trains(imported):
    known = set(ours(imported["worker"])) - {"evenstep.cli", "evenstep.cli.main", "evenstep.cli.run"}
    assert len(known) <= MOST_OF_WORKER
    rooms = {name.split(".")[1] for name in known if "." in name}
    assert not rooms & {"checkpoint", "integrations", "jax", "sim", "tensorflow", "testing"}
    assert "evenstep.report.page" not in known


def test_neither_imports_a_package_beyond_those_that_evenstep_needs(imported):
    for modules in imported.values():
        packages = {name.split(".")[0] for name in modules}
        assert not packages - OTHERS - set(sys.stdlib_module_names)


def test_the_launcher_searches_for_no_garbage_while_it_imports_torch():
    command = (sys.executable, "-c", COLLECTIONS)
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GUARD_SECONDS).stdout.split()
    assert int(found[0]) <= 1  # Six and more without this.
    assert found[1] == "True"

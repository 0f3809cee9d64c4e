"""A script with torchft's `Manager` adopts evenstep in four lines."""

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.guard import GUARD_SECONDS
from torch.distributed import TCPStore

pytest.importorskip("torchft")

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parents[2] / "support" / "torchft_script.py"
CHANGES = {
    "import sys\n": "import sys\nimport support.lean_torch\nfrom evenstep.integrations.torchft import ElasticSession\n",
    "manager = Manager(\n": "manager = Manager(\n    use_async_quorum=False,\n",
    "model = DistributedDataParallel(manager, model)\n": "session = ElasticSession(manager, global_batch_size=24)\n",
    "optimizer = Optimizer(manager, optimizer)\n": "model, optimizer, loader ="
    " session.model(model), session.optimizer(optimizer), session.loader(loader)\n",
}


def adopted():
    script = SCRIPT.read_text(encoding="utf-8")
    for before, after in CHANGES.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    return script


def ran(folder, script, count, *, processes=1, started=None):
    """The exit codes of this many replicas of so many processes, of which the first run, and what they print."""
    from torchft.coordination import LighthouseServer

    (folder / "train.py").write_text(script, encoding="utf-8")
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, quorum_tick_ms=10, heartbeat_timeout_ms=5000
    )
    with ExitStack() as ending:
        ending.callback(lighthouse.shutdown)
        stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
        running, command, outputs = [], [sys.executable, "train.py"], []
        for slot, rank in itertools.product(range(count), range(started or processes)):
            told = {
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
                "REPLICA_GROUP_ID": str(slot),
                "NUM_REPLICA_GROUPS": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(stores[slot].port),
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "GLOO_SOCKET_IFNAME": "lo",
                "RUST_LOG": "error",
            }
            outputs.append(folder / f"{slot}-{rank}.out")
            with outputs[-1].open("w") as out:
                running.append(subprocess.Popen(command, cwd=folder, env=os.environ | told, stdout=out, stderr=out))
            ending.callback(running[-1].kill)
        codes = [each.wait(GUARD_SECONDS) for each in running]
    return codes, [each.read_text(encoding="utf-8") for each in outputs]


def test_a_script_with_its_own_manager_adopts_evenstep_in_four_lines(tmp_path):
    codes, said = ran(tmp_path, adopted(), 2)
    assert codes == [0, 0], said
    last = {text.splitlines()[-1] for text in said}
    assert len(last) == 1
    assert last.pop().startswith("steps 20 weight")


def test_a_replica_of_several_processes_without_a_mesh_is_refused(tmp_path):
    codes, (said,) = ran(tmp_path, adopted(), 1, processes=2, started=1)
    assert codes == [1], said
    assert "this replica has 2 processes: give mesh, the device mesh of these processes alone" in said

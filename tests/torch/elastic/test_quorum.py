"""The quorum of torchft, as replicas ask for it."""

import os
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS

pytest.importorskip("torchft")

pytestmark = pytest.mark.multiprocess

ENDS = """
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from evenstep.torch.elastic.quorum import Quorum

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=10)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False, rank=0,
    world_size=1, store_addr="localhost", store_port=store.port, replica_id="0", hostname="localhost",
    lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
)
client = Quorum(manager, print, ahead=True)._client
client._request = {
    "group_rank": 0, "checkpoint_metadata": "", "shrink_only": False, "init_sync": True,
    "timeout": timedelta(milliseconds=100),
}
client.ask(0)  # Nobody else does.
raise SystemExit(3)
"""


def test_a_process_that_ends_while_it_asks_for_the_quorum_is_not_aborted():
    environment = {**os.environ, "RUST_LOG": "error"}
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == 3, done.stderr

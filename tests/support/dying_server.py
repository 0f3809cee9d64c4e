"""The server program, one of whose processes dies in its first life: before its commit of this number (from 1), or, as
the server of a group, before it passes on what would be its pushes of this number.

dying_server.py SHARD NUMBER SETTINGS
"""

import json
import os
import signal
import sys

from evenstep.server import program
from evenstep.server.group.group import Parent
from evenstep.server.shard_state import ShardState


def dying(act, number):
    done = []

    def dies_in_the_end(*arguments):
        done.append(None)
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*arguments)

    return dies_in_the_end


if __name__ == "__main__":
    shard, number, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    told = json.loads(settings)
    if told["index"] == shard and not told["resume"]:
        if told["parent"]:
            Parent.send_together = dying(Parent.send_together, number)
        else:
            ShardState.commit = dying(ShardState.commit, number)
    code = program.main([settings])
    assert "torch._dynamo" not in sys.modules, "a server has imported torch's compiler"
    sys.exit(code)

"""The server program, one of whose processes dies before its commit of this number (from 1), in its first life.

dying_server.py SHARD NUMBER SETTINGS
"""

import json
import os
import signal
import sys

from evenstep.runtime.server import program
from evenstep.runtime.server.replica import Replica

if __name__ == "__main__":
    shard, number, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    told = json.loads(settings)
    if told["index"] == shard and not told["resume"]:
        commit, done = Replica.commit, []

        def dying(self, *arguments):
            done.append(None)
            if len(done) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            commit(self, *arguments)

        Replica.commit = dying
    sys.exit(program.main([settings]))

"""Starts two servers, and closes them when it is interrupted: owner.py SNAPSHOTS COMMAND..."""

import signal
import sys
from contextlib import suppress
from pathlib import Path

from evenstep.runtime.server.process import ServerSettings, start_servers

settings = ServerSettings(count=2, workers=1, snapshots=Path(sys.argv[1]), command=tuple(sys.argv[2:]))
with start_servers(settings, lambda event: None):
    print("started", flush=True)
    with suppress(KeyboardInterrupt):
        signal.pause()

"""Starts two servers, and closes them when it is interrupted: owner.py SNAPSHOTS COMMAND..."""

import signal
import sys
from pathlib import Path

from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers

# What a shell starts in the background ignores interrupts, and so does all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Blocked, in the threads started here too, until it is waited for: signal.pause() misses one that comes just before.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
settings = ServerSettings(count=2, workers=1, snapshots=Path(sys.argv[1]), command=tuple(sys.argv[2:]))
with Servers(settings, lambda event: None):
    print("started", flush=True)
    signal.sigwait({signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the next one interrupts the closing

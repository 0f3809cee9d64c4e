"""Stands in for the server program: listens, tells the test what it was told, and ends as a server does.

    stand_in_server.py PORT BEHAVIOUR JSON

PORT is the test's: each line sent there is about one event in this process's life. BEHAVIOUR: `good`; `fails` and
`fails-again` (exit with 3 before listening, always or on resuming); `mute` (never listens); `stubborn` (ignores
SIGTERM and its standard input); `slow` (ends once the test lets it); `refuses` (ends with an error when asked to
end); `stops` (stops itself once it has said that it lives, unless it resumes). But for `empty` it says at once that
all workers have come.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until it is waited for
test = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
behaviour, told = sys.argv[2], json.loads(sys.argv[3])


def tell(**event):
    test.sendall(json.dumps(event).encode() + b"\n")


tell(event="started", told=told, pid=os.getpid(), secret=os.environ["EVENSTEP_SECRET"])
if behaviour == "fails" or (behaviour == "fails-again" and told["resume"]):
    sys.exit(3)
if behaviour == "mute":
    signal.pause()
listener = socket.create_server((told["listen"], told["port"]))
addresses = [f"unix:@stand-in-{os.getpid()}", f"tcp://127.0.0.1:{listener.getsockname()[1]}"]
joins = range(told["workers"] if behaviour != "empty" else 0)
lines = [{"addresses": addresses}, *({"event": "join", "worker": each, "limit_seconds": 1.0} for each in joins)]
# In one write, which `print` does not promise: whoever reads the first line may be killed after it.
os.write(1, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
if behaviour == "stops" and not told["resume"]:
    print(flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
if behaviour == "stubborn":
    tell(event="listening")
    signal.sigwait({signal.SIGTERM})
    tell(event="asked")
    signal.pause()
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGTERM, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
tell(event="listening")
select.select([0, read], [], [])
# A signal's handler may run only after its sender's next deed, the end of the input, has been seen.
ready, _, _ = select.select([read], [], [], 0)
if behaviour == "slow":
    tell(event="asked")
    test.recv(1)
tell(event="ended", by="signal" if ready else "stdin")
with Path(told["snapshots"], "ended").open("a") as file:
    file.write(f"{told['index']} ")
sys.exit(4 if behaviour == "refuses" else 0)

"""What a server needs: its peak beyond what the program itself takes, over the weights and the optimizer's state.

Two messages for each worker (gradients and weights) come on top by design and are taken off first. On one host these
lie in segments that are shared with the workers; the server's resident memory has each once, as this count does.
"""

import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from contestants import evenstep
from harness import record
from harness.workers import run_workers

from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers

MODEL_BYTES = 100_000_000
WORKERS = (1, 4)
OPTIMIZERS = {
    "SGD": (partial(torch.optim.SGD, lr=1e-3), 0),
    "SGD with momentum": (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), 1),
    "Adam": (partial(torch.optim.Adam, lr=1e-3), 2),
}
"""Each with how many tensors of state it has for a parameter."""
PATHS = {"shared memory": "unix:", "network": "tcp:"}
EXCHANGES = 3
GOAL = "<= 1.2"
SETTLED_SECONDS, POLL_SECONDS = 0.5, 0.01


def main():
    parser = record.arguments(__doc__)
    options = parser.parse_args()
    optimizers = ["SGD"] if options.quick else list(OPTIMIZERS)
    raw = {}
    for workers in WORKERS:
        for optimizer in optimizers:
            for path in PATHS:
                name = f"{optimizer}, {workers} worker{'s' if workers > 1 else ''}, {path}"
                raw[name] = one = _measure(optimizer, workers, PATHS[path])
                record.console.print(
                    f"  {name}: {one['over_needed']:.3f}, {one['over_needed_in_snapshot']:.3f} in the snapshot"
                )
    done = record.publish(
        "server_memory",
        f"Memory of a server, a model of {MODEL_BYTES // 10**6} MB",
        options,
        config={
            "model_bytes": MODEL_BYTES,
            "exchanges_of_each_worker": EXCHANGES,
            "figure": "(peak - before the run - 2 messages for each worker) / (weights + optimizer state)",
            "peak": "VmHWM of the server process, which has shared segments once; counted anew for the last snapshot",
        },
        figures=[
            each
            for name, one in raw.items()
            for each in (
                record.figure(f"{name}: peak", [one["over_needed"]], goal=GOAL),
                record.figure(f"{name}: last snapshot, workers gone", [one["over_needed_in_snapshot"]], goal=GOAL),
            )
        ],
        tables=[_table(raw)],
        raw=raw,
    )
    return 0 if done else 1


def _measure(optimizer, workers, kind):
    parameters = evenstep.model(MODEL_BYTES // 4)
    run = evenstep.run_of(parameters, OPTIMIZERS[optimizer][0](parameters.values()), workers)
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(count=1, workers=workers, snapshots=Path(folder) / "snapshots")
        before = {child.pid for child in psutil.Process().children()}
        with Servers(settings, _refuse) as servers:
            (server,) = (child for child in psutil.Process().children() if child.pid not in before)
            baseline = _settled(server)
            addresses = [address for address in servers.addresses[0] if address.startswith(kind)]
            plan = (run, addresses, servers.secret, server.pid)
            at_work = run_workers(workers, _work, plan, show=lambda text: None)
            left = _settled(server)
            # From here on the peak is counted anew: the workers are gone, and their messages with them.
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")
            with _Watch(server) as watch:
                servers.close()
    state = OPTIMIZERS[optimizer][1]
    needed, messages = MODEL_BYTES * (1 + state), 2 * workers * MODEL_BYTES

    return {
        "over_needed": (at_work["VmHWM"] - baseline["VmRSS"] - messages) / needed,
        "over_needed_in_snapshot": (watch.peak - baseline["VmRSS"]) / needed,
        "before": baseline,
        "at_work": at_work,
        "workers_gone": left,
        "snapshot_peak": watch.peak,
        "needed": needed,
        "messages": messages,
    }


def _refuse(event):
    raise RuntimeError(f"the server did not serve the whole time: {event.text}")


def _work(rank, plan, tell):
    """Some exchanges, and then, while every worker is still there, what the server's memory is."""
    run, addresses, secret, server = plan
    worker = evenstep.Worker(rank, run, evenstep.model(MODEL_BYTES // 4), addresses, secret)
    for _ in range(EXCHANGES):
        worker.exchange()
    dist.barrier()
    found = _memory(psutil.Process(server)) if rank == 0 else None
    dist.barrier()
    worker.close()
    return found


# A process's memory, in bytes.


def _memory(process):
    """Resident now, of it private and shared segments, and at most so far."""
    names = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem")
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {
        name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines) if name in names
    }


def _settled(process):
    """When it has not grown for a while: a server that waits for its workers still imports what it will need."""
    found, since = _memory(process), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(POLL_SECONDS)
        now = _memory(process)
        if now["VmRSS"] != found["VmRSS"]:
            found, since = now, time.monotonic()
    return found


class _Watch:
    """The most that a process has had until it ends, looked up again and again."""

    def __init__(self, process):
        self.peak = 0
        self._process = process
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _look(self):
        while not self._done.wait(POLL_SECONDS):
            try:
                self.peak = max(self.peak, _memory(self._process).get("VmHWM", 0))
            except (FileNotFoundError, ProcessLookupError):
                return


def _table(raw):
    def megabytes(value):
        return f"{value / 1e6:.0f}"

    return record.table(
        "In MB: the program before the run, its peak at work, what is private and shared then, what it needs, and its"
        " peak in the last snapshot, when all workers have left",
        ("case", "before", "peak", "private", "shared", "needed", "messages", "in snapshot"),
        [
            [
                name,
                *map(
                    megabytes,
                    (
                        one["before"]["VmRSS"],
                        one["at_work"]["VmHWM"],
                        one["at_work"]["RssAnon"],
                        one["at_work"]["RssShmem"],
                        one["needed"],
                        one["messages"],
                        one["snapshot_peak"],
                    ),
                ),
            ]
            for name, one in raw.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

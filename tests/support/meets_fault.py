"""A training script in which one worker meets a fault: `meets_fault.py WORKER ITERATION FAULT SCHEME TIMEOUT`.

A fault that leaves the process alive says so on standard output, since nothing else shows that it took place.
"""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import lean_torch, training  # noqa: F401
from support.training import Run

WORKER, ITERATION, FAULT, SCHEME, TIMEOUT = sys.argv[1:]
RANK = int(os.environ["RANK"])


def meet():
    """Have the fault, here and now."""
    sys.stdout.write(f"worker {RANK} meets {FAULT}\n")
    sys.stdout.flush()
    if FAULT.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, FAULT))
    elif FAULT == "hang":
        threading.Event().wait()
    elif FAULT == "error":
        raise ValueError("boom")
    elif FAULT == "data worker":
        multiprocessing.active_children()[0].kill()
    elif FAULT == "cut":
        return  # The test cuts the cable now.
    else:
        sys.exit(int(FAULT))


if __name__ == "__main__":
    mine = str(RANK) == WORKER and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if mine and ITERATION == "start":
        meet()
    endless, data_workers = FAULT in ("cut", "data worker"), 2 * (FAULT == "data worker")
    run = Run(
        samples=400,
        epochs=10**6 if endless else 1,
        scheme=SCHEME,
        num_workers=data_workers,
        options={"timeout": float(TIMEOUT)},
    )
    model, optimizer, loader = training.prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            if mine and loader.iteration == int(ITERATION):
                meet()
            training.step(model, optimizer, inputs, targets)
    sys.stdout.write(f"worker {RANK} finished\n")

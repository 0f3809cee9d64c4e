"""A script for `evenstep run` under any framework in which a fault befalls worker 1: faulty.py FRAMEWORK FAULT [FILES].

`listens` is none: worker 1 writes what its network listens on into the first FIFO, and waits for the second.
"""

import os
import signal
import sys
import threading
from importlib import import_module

import psutil

from support.frameworks.task import Job

FAULT, FIFOS = sys.argv[2], sys.argv[3:]
FAULTY = os.environ["RANK"] == "1"


def takes_sigterm():
    """Whether something in this process handles SIGTERM."""
    with open("/proc/self/status", encoding="ascii") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> signal.SIGTERM - 1 & 1)


def befall():
    if FAULT == "hangs":
        threading.Event().wait()
    elif FAULT == "listens":
        found = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        with open(FIFOS[0], "w", encoding="ascii") as file:
            print(*(each.port for each in found), file=file)
        with open(FIFOS[1], encoding="ascii") as file:
            file.read()
    elif FAULT == "exits":
        os._exit(0)
    elif FAULT == "raises":
        raise ValueError("boom")
    else:
        os.kill(os.getpid(), getattr(signal, FAULT))


if __name__ == "__main__":
    framework = import_module(f"support.frameworks.of_{sys.argv[1]}")
    if sys.argv[1] == "jax":
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
        jax.devices()  # Which waits for all workers, as initialize does, for as long as JAX says.
    if FAULT == "never comes" and FAULTY:
        threading.Event().wait()
    if sys.argv[1] == "tensorflow":
        framework.evenstep.tensorflow.init()
    for number, _ in enumerate(framework.train(Job(scheme="bsp"))):
        if number == 1 and FAULTY:
            print("worker 1 takes SIGTERM" if takes_sigterm() else "worker 1 ends with SIGTERM", flush=True)
            befall()

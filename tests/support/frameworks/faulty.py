"""A script for `evenstep run` in which a fault befalls worker 1: faulty.py FRAMEWORK FAULT MOMENT FOLDER.

`listens` and `waits` are none: worker 1 writes into the FIFO `ready` of the folder, which the former tells what its
network listens on, and waits for the FIFO `go on`.
"""

import os
import signal
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import psutil

from evenstep.launch.supervisor import RESTART_VARIABLE
from support.frameworks import kinds
from support.frameworks.faults import ITERATIONS
from support.frameworks.task import Job

FRAMEWORK, FAULT, MOMENT, FOLDER = *sys.argv[1:4], Path(sys.argv[4])
FAULTY = os.environ["RANK"] == "1" and os.environ[RESTART_VARIABLE] == "0"
KIND = "dense over time"
IN_TRAINING = ("another model", "other data", "NaN", "NaN refused")


def takes_sigterm():
    """Whether something in this process handles SIGTERM."""
    with open("/proc/self/status", encoding="ascii") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> signal.SIGTERM - 1 & 1)


def befall(moment):
    """The fault, on worker 1 at its moment."""
    if not FAULTY or moment != MOMENT or FAULT in IN_TRAINING:
        return
    print("worker 1 takes SIGTERM" if takes_sigterm() else "worker 1 ends with SIGTERM", flush=True)
    (FOLDER / "fired").touch()
    if FAULT == "hangs":
        threading.Event().wait()
    elif FAULT in ("listens", "waits"):
        found = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        (FOLDER / "ready").write_text(" ".join(str(each.port) for each in found))
        (FOLDER / "go on").read_text()
    elif FAULT == "exits":
        os._exit(0)
    elif FAULT == "raises":
        raise ValueError("boom")
    else:
        os.kill(os.getpid(), signal.SIGSTOP if FAULT == "stopped" else signal.SIGKILL)


def iterations():
    """Training, in which worker 1 may have another model, other data, or a loss that is not finite."""
    if FAULT not in IN_TRAINING:
        return import_module(f"support.frameworks.of_{FRAMEWORK}").train(Job(scheme="bsp"))
    training, job = import_module(f"support.frameworks.kinds_{FRAMEWORK}"), Job(scheme="by hand", kind=KIND)
    (FOLDER / "fired").touch()
    if FAULT == "another model":
        job = replace(job, odd="shape" if FAULTY else None)
    elif FAULT == "other data":
        training.samples = lambda kind: tuple(each[:: -1 if FAULTY else 1] for each in kinds.samples(kind))
    else:
        kinds.FAULT, job = ITERATIONS[MOMENT], replace(job, faulty=FAULTY)
        training.SCHEME = replace(kinds.SCHEME, nonfinite="skip" if FAULT == "NaN" else "refuse")
    return training.train(job)


if __name__ == "__main__":
    if FRAMEWORK == "jax":
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
        jax.devices()  # Which waits for all workers, as initialize does, for as long as JAX says.
    befall("start")
    if FRAMEWORK == "tensorflow":
        import_module("evenstep.tensorflow").init()
    moments = {number: moment for moment, number in ITERATIONS.items()}
    for number, _ in enumerate(iterations()):
        befall(moments.get(number))
    befall("close")

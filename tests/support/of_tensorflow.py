"""Starts workers with TensorFlow, where it is installed."""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.frameworks.table import is_installed
from support.guard import GUARD_SECONDS

ROOT = Path(__file__).parents[2]
WORKERS = 2
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMP_NUM_THREADS": "1",
}
"""The environment of a process with TensorFlow, of which there are several on this machine."""


def require():
    """Skip the test where there is no TensorFlow."""
    if not is_installed("tensorflow"):
        pytest.skip("needs tensorflow: make test-all runs this where it is installed")


def environment(**more):
    """For processes with TensorFlow: quiet, with one thread each, and with the sources and tests of this tree."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("EVENSTEP_")}
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    # The test holds each worker's port until the end, so that nobody else is given it.
    return {**given, **QUIET, "TF_GRPC_REUSE_PORT": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def run(folder, arguments, *, workers=WORKERS, cluster=True, **variables):
    """Run `python ARGUMENTS` on each worker with its TF_CONFIG; returns the exit codes and what each said."""
    require()
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
        processes = []
        for rank in range(workers):
            config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
            own = {"TF_CONFIG": json.dumps(config)} if cluster else {}
            said = stack.enter_context((folder / f"said.{rank}").open("wb"))
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environment(**own, **variables),
                    cwd=folder,
                )
            )
        deadline = time.monotonic() + GUARD_SECONDS
        try:
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    texts = [(folder / f"said.{rank}").read_text(errors="replace") for rank in range(workers)]
    for rank, text in enumerate(texts):
        print(f"worker {rank} ended with {processes[rank].returncode} and said:", text[-4000:])
    return [process.returncode for process in processes], texts


def do(folder, jobs, **options):
    """What each job came to on each worker. A job is the name of a function in tensorflow_jobs, and its arguments."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    codes, texts = run(folder, ["-m", "support.tensorflow_jobs", folder], **options)
    assert set(codes) == {0}, f"the workers ended with {codes}, of which the first said {texts[0][:2000]}"
    return [pickle.loads((folder / f"result.{rank}").read_bytes()) for rank in range(len(codes))]

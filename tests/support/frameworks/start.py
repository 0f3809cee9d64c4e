"""Starts the workers of one framework, each a process of its own, and collects what became of each job."""

import os
import pickle
import select
import subprocess
import sys
import time

from support.frameworks.task import WORKERS
from support.guard import GUARD_SECONDS
from support.ports import free_port


def run(name, jobs, folder):
    """What each job came to on each worker, by rank: a dict by the jobs' names, or None of a worker that was killed."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    said = [(folder / f"said.{rank}").open("wb+") for rank in range(WORKERS)]
    command = [sys.executable, "-m", "support.frameworks.worker", name, str(folder)]
    addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(WORKERS))
    processes, waiting = [], set()
    for rank, output in enumerate(said):
        done, doing = os.pipe()  # The worker closes its end when it has written its results, or by its end.
        processes.append(
            subprocess.Popen(
                [*command, str(rank), addresses, str(doing)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[doing],
            )
        )
        os.close(doing)
        waiting.add(done)
    ends = list(waiting)
    results = [folder / f"result.{rank}" for rank in range(WORKERS)]
    deadline = time.monotonic() + GUARD_SECONDS
    try:
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(select.select(waiting, [], [], left)[0])
    finally:
        for done in ends:
            os.close(done)
        for process in processes:
            process.kill()
            process.communicate()
    for rank, output in enumerate(said):
        output.seek(0)
        print(f"worker {rank} ended with {processes[rank].returncode} and said:", output.read().decode()[-4000:])
        output.close()
    return [pickle.loads(each.read_bytes()) if each.exists() else None for each in results]


def leave(path, results, doing):
    """Write the results, and wait to be killed: other workers may still ask this one who is gone."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(pickle.dumps(results))
    part.rename(path)
    os.close(doing)
    sys.stdin.read()

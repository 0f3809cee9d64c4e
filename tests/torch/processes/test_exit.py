"""The end of a process in which Gloo's threads still have something to do."""

import threading

import torch

from evenstep.torch.processes.join_workers import await_gloo


def test_a_thread_that_is_busy_is_waited_for():
    rows, began, done = torch.rand(500, 500), threading.Event(), threading.Event()

    def work():
        for _ in range(100):
            began.set()
            rows @ rows
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    await_gloo(600)
    assert done.is_set()
    thread.join()

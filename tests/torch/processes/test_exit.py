"""The end of a process in which something is still under way."""

import subprocess
import sys
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


ENDLESS = """
import evenstep, torch

model = torch.nn.Linear(4, 1)
session = evenstep.Session()
model, optimizer = session.model(model), session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
shares = iter(session.shares(None, 8))
for _ in range(3):
    loss = model(torch.ones(len(next(shares).positions), 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loop_that_a_script_never_ends_is_closed_without_a_word():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=600)
    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr

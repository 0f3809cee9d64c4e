"""Errors of the communication library, as Gloo raises them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evenstep.launch.c10d import of_communication


def test_a_connection_on_which_an_operation_failed_fails_as_communication():
    store = dist.HashStore()

    def group(rank):
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    with ThreadPoolExecutor(2) as pool:
        first, _second = pool.map(group, range(2))
    for says in ("Timed out", "Application timeout caused pair closure"):
        with pytest.raises(RuntimeError, match=says) as caught:
            first.recv([torch.zeros(1)], 1, 0).wait(timedelta(milliseconds=1))
        assert of_communication(caught.value)
    assert not of_communication(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))

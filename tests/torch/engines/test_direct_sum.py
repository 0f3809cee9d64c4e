"""The sum in one or two hops has the bits of Gloo's ring, which is what keeps equal sizes identical to plain DDP."""

import pytest
import torch
from support import training
from support.processes import results, run_workers

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_the_same_bits_as_all_reduce(workers):
    for count in (1, 2 * workers + 1, 1001):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for value in results(run_workers(training.sum_both_ways, workers, count, dtype)):
                assert value["equal"]
                assert value["rows"] == [[rank, -7, 2**62] for rank in range(workers)]

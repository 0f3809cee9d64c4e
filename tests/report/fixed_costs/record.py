"""Records the runs in this folder: training whose iterations have a large fixed part, under two schemes by turns.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/report/fixed_costs/record.py
"""

import gzip
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import parse_cluster

SLOW = """
[disturbances.slow]
kind = "constant"
factor = 3
[[workers]]
[[workers]]
disturb = ["slow"]
"""
STEPS, WIDTH, BATCH = 32, 96, 32
SCHEMES, EPOCHS, ITERATIONS = ("lb-bsp", "bsp"), 40, 10
HERE = Path(__file__).parent


class Recurrent(torch.nn.Module):
    """Its steps follow each other, so one sample takes little less time than sixteen."""

    def __init__(self):
        super().__init__()
        self.memory = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return self.head(self.memory(inputs)[0][:, -1])


def main():
    """Train under both schemes, an epoch of each in turn, so that what else the machine does slows both alike.

    There are two workers, one of them made three times slower. `seconds.json` has what the epochs but the first took.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    prepared = [_prepare(Path(folder[0], scheme), scheme) for scheme in SCHEMES]
    seconds = [[_epoch(*each) for each in prepared] for _ in range(EPOCHS)]
    for _, _, loader in prepared:
        loader.close()
    dist.barrier()
    if dist.get_rank() == 0:
        for log in Path(folder[0]).glob("*/worker-*.jsonl"):
            kept = HERE / log.parent.name / f"{log.name}.gz"
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(gzip.compress(log.read_bytes(), mtime=0))
        taken = [sum(each) for each in zip(*seconds[1:], strict=True)]
        (HERE / "seconds.json").write_text(json.dumps(dict(zip(SCHEMES, taken, strict=True))) + "\n")
    dist.destroy_process_group()


def _prepare(run_dir, scheme):
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(ITERATIONS * BATCH, STEPS, WIDTH), torch.randn(ITERATIONS * BATCH, 1))
    model = Recurrent()
    return evenstep.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(dataset, batch_size=BATCH // 2, shuffle=True),
        scheme=scheme,
        emulate=parse_cluster(SLOW),
        run_dir=run_dir,
    )


def _epoch(model, optimizer, loader):
    dist.barrier()
    began = time.perf_counter()
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""What each of two hosts runs under torchrun: trains, and prints its weights and the sizes as one line of JSON."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import lean_torch, training  # noqa: F401

if __name__ == "__main__":
    run = replace(training.Run(scripted=31, samples=82, epochs=2), options={"timeout": 40.0})
    value = training.train(run)
    Path(sys.argv[1], f"worker-{dist.get_rank()}.json").write_text(json.dumps(value), encoding="utf-8")
    dist.destroy_process_group()

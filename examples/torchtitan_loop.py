"""Trains torchtitan's Llama 3 debug model in a loop of its own: torchtitan splits the model, evenstep sizes batches."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep

try:
    from torchtitan.tools import utils
except ModuleNotFoundError:
    sys.exit("this example needs torchtitan: pip install torchtitan==0.3.0 triton")
if not torch.cuda.is_available():  # torchtitan takes any machine for one with a GPU.
    utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

CONTEXT = 64


def split_model(parallelism, dims, layers):
    """As torchtitan's trainer makes it: on no device first, then split, then with weights."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # The default, flex, needs a compiler.
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=CONTEXT, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=utils.device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=400)
    parser.add_argument("--shards", type=int, default=1, help="processes over which each replica's parts are sharded")
    options = parser.parse_args()

    dist.init_process_group()
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=dist.get_world_size() // options.shards // 2,
        data_parallel_shard_degree=options.shards,
        tensor_parallel_degree=2,
        spmd_backend="partial_dtensor",
    )
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    torch.manual_seed(0)
    model = split_model(parallelism, dims, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: options.sequences * (CONTEXT + 1)]))
    sequences = text.view(-1, CONTEXT + 1)
    loader = DataLoader(TensorDataset(sequences), batch_size=8, shuffle=True)

    data_dims = ("dp_replicate", "fsdp") if dims.dp_replicate_enabled else ("fsdp",)
    mesh = dims.get_mesh([*data_dims, "tp"])
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, mesh=mesh, data_dims=data_dims)
    for epoch in range(options.epochs):
        for (tokens,) in loader:
            loss = cross_entropy_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():  # On every process: a forward pass needs all of them.
            loss = cross_entropy_loss(model(sequences[:32, :-1]), sequences[:32, 1:]) / (32 * CONTEXT)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, batch sizes {loader.batch_sizes}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

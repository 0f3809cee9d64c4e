"""A checksum of a few samples of a dataset, with which workers notice that their datasets differ."""

import multiprocessing
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from evenstep.core.common_data import bytes_of, checksum
from evenstep.torch.data.randomness import seed_generators, seeded_randomness
from evenstep.torch.data.sampling import Positions
from evenstep.torch.data.shards import ShardedDataset
from evenstep.torch.engines.traces import tensors_of


def checksum_of(loader: DataLoader[Any]) -> int:
    """The checksum of the first, middle and last sample of the loader's dataset; 0 if samples cannot be compared.

    The script's random numbers are not changed and do not matter. If the loader has data workers, the dataset stays as
    it is: many datasets open files at their first sample, which data workers must not inherit. So a data worker
    fetches the samples, or this process does, from a copy like the one that a data worker would get.
    """
    dataset = loader.dataset
    if isinstance(dataset, Positions):
        return 0
    if isinstance(dataset, ShardedDataset):  # A sample would cost a whole shard.
        return zlib.crc32(repr(dataset.lengths).encode())
    try:
        length, processes = len(dataset), min(loader.num_workers, 1)  # type: ignore[arg-type]
        # A script that has not chosen a start method may still do so later.
        context: Any = loader.multiprocessing_context or multiprocessing
        method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if processes and method != "fork":  # Starting another process takes seconds.
            dataset, processes = pickle.loads(pickle.dumps(dataset)), 0
        samples = DataLoader(
            dataset,
            batch_sampler=[list(dict.fromkeys((0, length // 2, length - 1)))],
            num_workers=processes,
            collate_fn=checksum_of_samples,
            timeout=loader.timeout if processes else 0,
            worker_init_fn=seed_generators,
            multiprocessing_context="fork" if processes else None,
            generator=torch.Generator(),  # Otherwise it draws a number here that a data worker does not.
        )
        with seeded_randomness(0):  # The data worker, number 0, has the same seed.
            (found,) = samples
    except Exception:  # If it is an error of the dataset, training meets it again.
        return 0
    return int(found)


def checksum_of_samples(samples: Any) -> int:
    """The checksum of samples, or of a batch, without the parts that cannot be compared."""
    return checksum(_parts(samples))


def checksum_of_batch(batch: Any) -> int:
    """The checksum of three values of each row of the tensors of a batch that the host has; 0 if there are none."""
    dense = [each for each in tensors_of(batch) if each.layout is torch.strided and not each.is_nested]
    rows = [each for each in dense if each.is_cpu and each.numel()]
    places = (lambda _: 0), (lambda length: length // 2), (lambda _: -1)
    return checksum_of_samples([each[(..., *map(at, each.shape[1:]))] for each in rows for at in places])


def _parts(value: Any) -> Iterator[bytes]:
    """The bytes of samples in a defined order, without parts that cannot be compared."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield f"{value.dtype}{list(value.shape)}".encode()
            flat = value.detach().cpu().resolve_conj().resolve_neg().flatten().contiguous()
            yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        if b"/" not in text and b"\\" not in text:  # The path of a file may differ.
            yield text
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, np.ndarray | np.generic | bool | int | float) or hasattr(value, "__array_interface__"):
        yield bytes_of(np.asarray(value))  # Also of an image of PIL.

"""A sum over workers that travels in a narrow format."""

from collections.abc import Hashable
from typing import final

import torch
import torch.distributed as dist

from evenstep.schemes.scheme import WIRE_BLOCK, Wire
from evenstep.tensors.narrow import pack, unpack


@final
class NarrowSum:
    """Sums vectors of all workers in a narrow format, in two hops: each worker sums a part, and all get its sum.

    What rounding leaves out is added to the next sum, of the worker's vector before the first hop and of the part that
    it sums before the second (error feedback, Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847).
    """

    def __init__(self, wire: Wire, group: dist.ProcessGroup) -> None:
        self._wire, self._group = wire, group
        self._left: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def sum(self, key: Hashable, vector: torch.Tensor) -> torch.Tensor:
        """The sum of the workers' vectors of this key: float32, and the same to the bit on all workers.

        Raises:
            RuntimeError: A collective failed.
        """
        count, wire = self._group.size(), self._wire
        part = -(-len(vector) // (count * WIRE_BLOCK)) * WIRE_BLOCK
        given = torch.nn.functional.pad(vector, (0, count * part - len(vector)))
        before = self._left.get(key)
        if before is not None:
            given += before[0]
        sent = torch.stack([pack(each, wire) for each in torch.split(given, part)])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self._group)
        total = torch.stack([unpack(each, wire) for each in got]).sum(0)
        if before is not None:
            total += before[1]
        packed = pack(total, wire)
        sums = [torch.empty_like(packed) for _ in range(count)]
        dist.all_gather(sums, packed, group=self._group)
        kept = given.sub_(torch.cat([unpack(each, wire) for each in sent])), total.sub_(unpack(packed, wire))
        self._left[key] = kept
        return torch.cat([unpack(each, wire) for each in sums])[: len(vector)]

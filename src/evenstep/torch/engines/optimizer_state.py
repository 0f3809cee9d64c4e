"""The state of the user's optimizer, which the servers keep."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, final

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec, Options
from evenstep.tensors.states import by_shard, decode_states, encode_states
from evenstep.torch.engines.describe import options_of, state_by_index, state_by_name
from evenstep.worker.servers.link import Link


@final
class OptimizerState:
    """The options of the user's optimizer, and its state, which the servers keep."""

    def __init__(
        self,
        link: Link,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        parameters: dict[str, torch.nn.Parameter],
        layouts: Sequence[ShardLayout],
    ) -> None:
        self._link = link
        self._spec = spec
        self._optimizer = optimizer
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._shards = [[each.name for each in layout.parameters] for layout in layouts]
        self._values: list[list[object]] = []
        """Of the options of each group, when they were described last."""
        self._writable = False
        """Whether one of these can change and stay the same object."""
        self._options: tuple[Options, ...] = ()

    def options(self) -> tuple[Options, ...]:
        """The present options."""
        groups = self._optimizer.param_groups
        values = [[group[name] for name in known] for known, group in zip(self._spec.groups, groups, strict=False)]
        if self._writable or values != self._values or len(groups) != len(self._options):
            self._options = options_of(self._spec, self._optimizer)
            self._values = values
            self._writable = any(isinstance(each, torch.Tensor | list) for each in chain.from_iterable(values))
        return self._options

    def fetch(self) -> dict[str, Any]:
        """The state dict of the user's optimizer, with the servers' state."""
        states: dict[str, dict[str, object]] = {}
        for encoded in self._link.fetch_states():
            states |= decode_states(encoded)
        return {**self._optimizer.state_dict(), "state": state_by_index(self._optimizer, self._names, states)}

    def hand_over(self) -> None:
        """Send the state that the user's optimizer has, if any, to the servers."""
        state_dict = self._optimizer.state_dict()
        if state_dict["state"]:
            states = state_by_name(self._optimizer, self._names, state_dict)
            self._link.load_states([encode_states(own) for own in by_shard(states, self._shards)])

    def clear(self) -> None:
        """The servers have the state: it is not needed here."""
        self._optimizer.state.clear()

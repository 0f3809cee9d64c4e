"""Splits state dicts into tensors and plain values, and joins them again.

The tensors go to torch.distributed.checkpoint, which can shard and reshard them. The rest is small. It has an empty
tensor in the place of each tensor, and is read back as plain values only.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch

from evenstep.core.errors import ConfigError


def take_apart(tree: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree without its tensors, and the tensors by their path in it, such as `model.0.layer.weight`.

    Raises:
        ConfigError: Two tensors have the same path.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: str, node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            if path in tensors:
                raise ConfigError(f"the state to be saved has two tensors at {path!r}: rename one of them")
            tensors[path] = node.detach()
            return torch.empty(0)
        return _rebuilt(path, node, take)

    return {key: take(key, node) for key, node in tree.items()}, tensors


def put_together(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `take_apart`."""

    def put(path: str, node: Any) -> Any:
        return tensors[path] if isinstance(node, torch.Tensor) else _rebuilt(path, node, put)

    return {key: put(key, node) for key, node in plain.items()}


def _rebuilt(path: str, node: Any, visit: Any) -> Any:
    """Rebuild a node from the results of `visit` on its members; return a node without tensors unchanged."""
    if not _holds_tensors(node):
        return node
    if isinstance(node, Mapping):
        return {key: visit(f"{path}.{key}", value) for key, value in node.items()}
    members = [visit(f"{path}.{index}", value) for index, value in enumerate(node)]
    return members if isinstance(node, list) else tuple(members)


def _holds_tensors(node: Any) -> bool:
    if isinstance(node, torch.Tensor):
        return True
    members = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    return any(map(_holds_tensors, members))


def packed(what: str, plain: Any) -> bytes:
    """Plain values as bytes.

    Raises:
        ConfigError: Another value is among them, which could not be read back without running code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
        unpacked(buffer.getvalue())
    except Exception as error:  # pickle raises whatever the object does.
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"the state of {what} holds more than tensors and plain values, and is not saved ({reason}): have its"
            " state_dict return numbers, strings, tensors and lists or dicts of them"
        ) from error
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Plain values from bytes, without running any code in them."""
    return torch.load(io.BytesIO(content), weights_only=True)

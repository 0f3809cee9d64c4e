"""Choice of the communication backend for gradients of workers whose devices may differ."""

from collections.abc import Collection, Sequence

from evenstep.core.errors import ConfigError
from evenstep.core.workers import name_workers

GLOO = "gloo"


def common_backend(devices: Sequence[str], backends: Sequence[str], carried: Collection[str]) -> str:
    """The backend for all workers: the default of their devices if it is the same for all, else Gloo.

    Args:
        devices: The type of each worker's device, by rank.
        backends: The default backend of each device; empty if it has none.
        carried: The types of devices whose tensors Gloo carries.

    Raises:
        ConfigError: A device has no backend, or Gloo cannot carry the tensors of a device that needs it.

    >>> common_backend(["cuda", "cuda"], ["nccl", "nccl"], ["cpu", "cuda"])
    'nccl'
    >>> common_backend(["cuda", "cpu"], ["nccl", "gloo"], ["cpu", "cuda"])
    'gloo'
    """
    lacking = [rank for rank, backend in enumerate(backends) if not backend]
    if lacking:
        raise ConfigError(
            f"no communication backend is registered for the device type {devices[lacking[0]]!r} of"
            f" {name_workers(lacking)}: import the package of that device before prepare"
        )
    if len(set(backends)) == 1:
        return backends[0]
    foreign = [rank for rank, device in enumerate(devices) if device not in carried]
    if foreign:
        raise ConfigError(
            f"{name_workers(foreign)} cannot exchange gradients with the others: their devices differ"
            f" ({', '.join(sorted(set(devices)))}), so gradients go through Gloo, which carries {' and '.join(carried)}"
            " alone; give all workers one type of device"
        )
    return GLOO

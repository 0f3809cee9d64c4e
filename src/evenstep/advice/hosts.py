"""What of the hosts of a run would make it fail or slow, from the facts that each of them reports."""

from collections.abc import Iterator, Sequence
from typing import Final, final

import msgspec

_SAME: Final = ("evenstep", "python", "torch", "numpy", "cuda")


@final
class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host.

    Attributes:
        name: Its name.
        node: Its number among the nodes of the run.
        workers: Those that it runs.
        devices: The device of each of them.
        processors: How many this host lets a process use.
        interfaces: Its network interfaces that are up, with their IPv4 addresses.
        secret: A proof of the secret in its environment, the same where the secret is; None without one.
        found: What `evenstep env` prints there.
    """

    name: str
    node: int
    workers: list[int]
    devices: list[str]
    processors: int
    interfaces: list[str]
    secret: str | None
    found: dict[str, str | list[str]]


def hosts_of(workers: Sequence[HostFacts]) -> list[HostFacts]:
    """A record for each host, from those of its workers, of which one at least says what is installed."""
    nodes: dict[int, list[HostFacts]] = {}
    for each in workers:
        nodes.setdefault(each.node, []).append(each)
    names = [of_node[0].name for of_node in nodes.values()]
    return [
        msgspec.structs.replace(
            max(of_node, key=lambda each: len(each.found)),
            name=of_node[0].name if names.count(of_node[0].name) == 1 else f"{of_node[0].name} (node {node})",
            workers=[worker for each in of_node for worker in each.workers],
            devices=[device for each in of_node for device in each.devices],
        )
        for node, of_node in sorted(nodes.items())
    ]


def warnings(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """A sentence for each thing to change; none for hosts that fit together."""
    for package in _SAME:
        versions: dict[str, list[str]] = {}
        for host in hosts:
            versions.setdefault(str(host.found.get(package, "missing")), []).append(host.name)
        if len(versions) > 1:
            told = " and ".join(f"{version} on {', '.join(names)}" for version, names in versions.items())
            yield f"{package} is {told}: install the same everywhere"
    for host in hosts:
        on_cpu = host.devices.count("cpu")
        if on_cpu > host.processors:
            yield (
                f"{host.name} runs {on_cpu} workers on {host.processors} processors, so they take turns: start at most"
                f" {host.processors} there"
            )
    if len(hosts) > 1:
        yield from _secrets(hosts)


def _secrets(hosts: Sequence[HostFacts]) -> Iterator[str]:
    without = [host.name for host in hosts if host.secret is None]
    if without and len(without) < len(hosts):
        yield f"EVENSTEP_SECRET is not set on {', '.join(without)}: set it to the same value on every host"
    elif len({host.secret for host in hosts}) > 1:
        yield "EVENSTEP_SECRET differs between hosts: set it to the same value on every host"

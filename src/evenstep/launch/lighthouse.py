"""torchft's Lighthouse, which the replicas of an elastic run ask who the members are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.one_host import LOOPBACK
from evenstep.schemes import parse_scheme


def require_elastic(settings: LaunchSettings) -> None:
    """Refuse what replicas that come and go cannot do, and a missing torchft."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells of each quorum, and reads this when it is imported.
    try:
        import torchft.coordination  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--elastic needs torchft: pip install torchft") from error
    if settings.scheme is not None:
        parse_scheme(settings.scheme).require_elastic()


@contextmanager
def quorum_of(settings: LaunchSettings) -> Iterator[str]:
    """The address of the Lighthouse: the one that the settings name, or one on this host, which runs here meanwhile."""
    from torchft.coordination import LighthouseServer

    assert settings.elastic is not None
    named = settings.lighthouse
    try:
        server = LighthouseServer(
            bind=f"{LOOPBACK}:0" if named is None else urlsplit(named).netloc,
            min_replicas=settings.elastic[0],
            # As long as a replica sends heartbeats the others wait for it, for it may only be slow.
            join_timeout_ms=round(settings.timeout_seconds() * 1000),
            quorum_tick_ms=20,
            # A replica sends ten a second, here or over a network.
            heartbeat_timeout_ms=1000 if named is None else 2000,
        )
    except RuntimeError:
        if named is None:
            raise
        yield named  # Of another host, or of another launcher on this one.
        return
    try:
        yield named or f"http://{LOOPBACK}:{server.address().rpartition(':')[2]}"  # Its own names this host, by name.
    finally:
        server.shutdown()

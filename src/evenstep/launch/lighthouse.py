"""torchft's Lighthouse, which the replicas of an elastic run ask who the members are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import parse_scheme

_HEARTBEAT_MILLISECONDS: Final = 2000
"""How long a replica, which sends ten heartbeats a second, may be silent. Its death is noticed after this time."""
_TICK_MILLISECONDS: Final = 20


def require_elastic(settings: LaunchSettings) -> None:
    """Refuse what replicas that come and go cannot do, and a missing torchft."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells of each quorum, and reads this when it is imported.
    try:
        import torchft.coordination  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--elastic needs torchft: pip install 'evenstep[torchft]'") from error
    scheme = None if settings.scheme is None else parse_scheme(settings.scheme)
    if scheme is not None and not scheme.sums_every_gradient:
        raise ConfigError(
            f"--elastic goes with schemes that sum gradients in every step, not with {scheme.name!r}: use lb-bsp"
        )


@contextmanager
def quorum_of(settings: LaunchSettings) -> Iterator[str]:
    """The address of the Lighthouse that the settings name, or else of one that runs here meanwhile."""
    if settings.lighthouse is not None:
        yield settings.lighthouse
        return
    from torchft.coordination import LighthouseServer

    assert settings.elastic is not None
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=settings.elastic[0],
        # As long as a replica sends heartbeats the others wait for it, for it may only be slow.
        join_timeout_ms=round(settings.timeout_seconds() * 1000),
        quorum_tick_ms=_TICK_MILLISECONDS,
        heartbeat_timeout_ms=_HEARTBEAT_MILLISECONDS,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"  # Its own names this host, by name.
    finally:
        server.shutdown()

"""Checks which schemes can divide samples by cost."""

from evenstep.core.errors import ConfigError
from evenstep.core.load.static import Static
from evenstep.schemes.given_sizes import ByKey
from evenstep.schemes.scheme import Scheme


def require_costs(scheme: Scheme) -> None:
    """Check that the scheme can divide samples by cost; ConfigError with the reason if it cannot."""
    if scheme.period is not None:
        raise ConfigError(
            f"cost goes with schemes that exchange gradients, and {scheme.name!r} averages models: leave out cost, or"
            " use another scheme, such as lb-bsp, dbs, bsp or asp"
        )
    if scheme.load.multiple not in (1, scheme.micro_batch):
        raise ConfigError(
            f"cost gives workers any number of samples, and multiple={scheme.load.multiple} rules most of them out:"
            " leave out one of them"
        )
    if isinstance(scheme.load, Static | ByKey):
        raise ConfigError("batch sizes fix how many samples a worker gets, and cost would: leave out one of them")

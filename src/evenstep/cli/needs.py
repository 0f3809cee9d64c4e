"""What a subcommand needs beyond evenstep's own dependencies."""

import importlib.util

from evenstep.core.errors import ConfigError


def require_torch(name: str, extra: str = "torch") -> None:
    """Refuse where PyTorch is missing.

    Raises:
        ConfigError: It is.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"evenstep {name} needs PyTorch: pip install 'evenstep[{extra}]', or install the build for your device"
            " (https://pytorch.org)"
        )


def require_scikit_learn(name: str) -> None:
    """Refuse where scikit-learn is missing.

    Raises:
        ConfigError: It is.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"evenstep {name} needs scikit-learn for its images of digits: pip install 'evenstep[demo]'")


def require_plotly(name: str) -> None:
    """Refuse where plotly is missing.

    Raises:
        ConfigError: It is.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError(f"evenstep {name} needs plotly for its page: pip install 'evenstep[report]'")

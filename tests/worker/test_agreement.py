import gc
import weakref
from contextlib import suppress

import pytest

from evenstep.core.errors import ConfigError
from evenstep.worker.agreement import tell


class Kept:
    pass


def refuse():
    raise ConfigError("no")


def fail(record):
    raise OSError("gone")


@pytest.mark.parametrize("exchange", [lambda record: [record], fail])
def test_a_refusal_is_told_and_keeps_nothing_of_the_script(exchange):
    # What a cycle keeps, such as another run, ends when the collector comes, and in a killed process never.
    told = []

    def script():
        kept = Kept()
        with suppress(ConfigError):
            tell(refuse, lambda record: [told.append(record), exchange(record)][1])
        return weakref.ref(kept)

    gc.disable()
    try:
        assert script()() is None
    finally:
        gc.enable()
    assert told == [{"error": "no"}]

"""What was not prepared steps as usual before and after a loop over prepared batches, and is refused in it."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.worker.api.share_batches import refused


class Stepping:
    prepared = False

    def step(self, by):
        return by


def refusal(stepped):
    return None if stepped.prepared else "it was not prepared"


def test_a_class_has_its_own_method_again_after_the_loop():
    usual, one, prepared = Stepping.step, Stepping(), Stepping()
    prepared.prepared = True
    with refused(Stepping, "step", refusal):
        assert prepared.step(by=3) == 3
        with pytest.raises(ConfigError, match="it was not prepared"):
            one.step(3)
    assert Stepping.step is usual
    assert one.step(3) == 3


def test_loops_that_end_in_any_order_refuse_nothing_afterwards():
    first, second = (refused(Stepping, "step", refusal) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(ConfigError):
        Stepping().step(3)
    second.__exit__(None, None, None)
    assert Stepping().step(3) == 3

import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.load.given import sizes_by_rank


def test_host_and_gpu_names_choose_sizes():
    described = [
        {"rank": "0", "host": "a", "gpu": "RTX 3090"},
        {"rank": "1", "host": "a", "gpu": ""},
        {"rank": "2", "host": "b", "gpu": "RTX 3090"},
    ]
    assert sizes_by_rank({"gpu:RTX 3090": 24, "host:a": 10}, described) == (10, 10, 24)
    assert sizes_by_rank({"gpu:RTX 3090": 24, "host:a": 10, "rank:0": 4}, described) == (4, 10, 24)
    assert sizes_by_rank({0: 1, 1: 2, 2: 3}, described) == (1, 2, 3)
    assert sizes_by_rank([1, 2, 3], described) == (1, 2, 3)
    with pytest.raises(ConfigError, match="did you mean 'host:a'"):
        sizes_by_rank({"host:aa": 3}, described)

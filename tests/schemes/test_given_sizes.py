import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.load.static import Static
from evenstep.schemes.given_sizes import ByKey, read_sizes, text_of

WORKERS = [
    {"rank": "0", "host": "a", "gpu": "RTX 3090"},
    {"rank": "1", "host": "a", "gpu": ""},
    {"rank": "2", "host": "b", "gpu": "RTX 3090"},
]


def of_workers(given):
    return ByKey(sizes=tuple(read_sizes(given).items())).of(WORKERS).sizes


def test_host_and_gpu_names_choose_sizes():
    assert of_workers({"gpu:RTX 3090": 24, "host:a": 10}) == (10, 10, 24)
    assert of_workers({"gpu:RTX 3090": 24, "host:a": 10, "rank:0": 4}) == (4, 10, 24)
    assert of_workers({0: 1, 1: 2, 2: 3}) == (1, 2, 3)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("12,9, 3", (12, 9, 3)),
        ("12/9/3", (12, 9, 3)),
        ("7", (7,)),
        (np.array([4, 2]), (4, 2)),
        ("rank:0=12, host:b=4,gpu:NVIDIA RTX 3090=24", {"rank:0": 12, "host:b": 4, "gpu:NVIDIA RTX 3090": 24}),
        ("gpu:AMD Instinct MI250X/MI250=24/host:node7 = 4", {"gpu:AMD Instinct MI250X/MI250": 24, "host:node7": 4}),
        ({0: np.int64(3), "host:b": 1}, {"rank:0": 3, "host:b": 1}),
    ],
)
def test_a_text_a_list_and_a_mapping_are_sizes(given, sizes):
    assert read_sizes(given) == sizes
    assert read_sizes(text_of(sizes)) == sizes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("12,x", "the batch size of worker 1 must be a whole number from 1 to 2147483647, not 'x'"),
        ("12,,3", "the batch size of worker 1 must be a whole number from 1 to 2147483647, not ''"),
        ("12,0", "the batch size of worker 1 must be a whole number from 1 to 2147483647, not 0"),
        ("9" * 5000, "the batch size of worker 0 must be a whole number from 1 to 2147483647, not '9999"),
        (["4"], "the batch size of worker 0 must be a whole number from 1 to 2147483647, not '4'"),
        ([True], "the batch size of worker 0 must be a whole number from 1 to 2147483647, not True"),
        ("rank:0=many", "the batch size of rank:0 must be a whole number from 1 to 2147483647, not 'many'"),
        ("rank:0=12,host:b", "the batch size of host:b must be a whole number from 1 to 2147483647, not ''"),
        ("rank:0=12,node:a=4", "a batch size cannot be that of 'node:a': write rank:NUMBER, host:NAME or gpu:NAME"),
        ("rank:0=12/rank:0=4", "a batch size stands twice in 'rank:0=12/rank:0=4': give it once"),
    ],
)
def test_what_is_no_size_is_named(given, says):
    with pytest.raises(ConfigError) as caught:
        read_sizes(given)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"host:aa": 3}, "there is a batch size of 'host:aa', which matches no worker: did you mean 'host:a'?"),
        ({"rank:3": 3}, "there is a batch size of 'rank:3', which matches no worker: did you mean 'rank:0'?"),
        ({"rank:0": 3}, "there is no batch size of workers 1 and 2: add a key such as 'host:a'"),
        ({"gpu:RTX 3090": 3}, "there is no batch size of worker 1: add a key such as 'host:a'"),
    ],
)
def test_each_key_has_a_worker_and_each_worker_a_key(given, says):
    with pytest.raises(ConfigError) as caught:
        of_workers(given)
    assert str(caught.value) == says


def test_sizes_by_key_decide_nothing_before_the_workers_are_known():
    load = ByKey(sizes=(("host:a", 3),))
    with pytest.raises(ConfigError, match="hosts and GPUs of the 2 workers are not known: give sizes by rank"):
        load.policy(2)
    assert load.given_sizes is None
    assert load.of([{"rank": "0", "host": "a", "gpu": ""}]) == Static(sizes=(3,))

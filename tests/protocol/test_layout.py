import tracemalloc

import msgspec
import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ALIGNMENT, MAX_BYTES, Layout, ShardLayout
from evenstep.tensors.messages import all_finite, flat_views, gather, parameter_views, scatter
from evenstep.torch.engines.describe import layout_of

LARGE = MAX_BYTES


def model():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(7, 5),
        torch.nn.Linear(5, 3).bfloat16(),
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.Linear(4, 1).double(),
    )
    layers[2].to(memory_format=torch.channels_last)
    return layers


def layout_of_layers(layers):
    optimizer = torch.optim.SGD([{"params": layers[:2].parameters()}, {"params": layers[2:].parameters()}], lr=0.1)
    return layout_of(layers.named_parameters(), [optimizer])


def record(*rows, groups=1):
    return {"groups": groups, "parameters": [list(row) for row in rows]}


def received(record):
    """A layout, as a server reads it from plain values."""
    return msgspec.convert(record, Layout)


GOOD = ("weight", [2, 3], "float32", 0)


def test_layout_survives_the_wire():
    layout = layout_of_layers(model())
    came = msgspec.json.decode(msgspec.json.encode(layout), type=Layout)
    assert came == layout
    assert came.shards(3) == layout.shards(3)


def test_fingerprint_tells_shapes_names_groups_and_dtypes_apart():
    rows = [GOOD, ("bias", [2, 3], "float32", 0), ("weight", [3, 2], "float32", 0), ("weight", [2, 3], "float64", 0)]
    rows.append(("weight", [2, 3], "float32", 1))
    shards = [received(record(row, groups=2)).shards(1)[0] for row in rows]
    assert len({shard.fingerprint for shard in shards}) == len(rows)


def test_blocks_are_aligned_and_hold_one_group_and_dtype_each():
    (shard,) = layout_of_layers(model()).shards(1)
    assert [(block.group, block.dtype) for block in shard.blocks] == [
        (0, "bfloat16"),
        (0, "float32"),
        (1, "float32"),
        (1, "float64"),
    ]
    assert all(block.offset % ALIGNMENT == 0 for block in shard.blocks)
    assert shard.nbytes % ALIGNMENT == 0
    assert all(first.end <= second.offset for first, second in zip(shard.blocks, shard.blocks[1:], strict=False))
    assert shard.parameters == tuple(parameter for block in shard.blocks for parameter in block.parameters)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_parameter_is_in_one_shard(count):
    layout = layout_of_layers(model())
    shards = layout.shards(count)
    assert len(shards) == count
    assert sorted(p.name for shard in shards for p in shard.parameters) == sorted(p.name for p in layout.parameters)
    assert all(shard.parameters for shard in shards)


def test_shards_are_balanced_by_bytes():
    rows = [(str(number), [size], "float32", 0) for number, size in enumerate([100, 1, 50, 49, 2, 99])]
    sizes = [sum(p.nbytes for p in shard.parameters) for shard in received(record(*rows)).shards(3)]
    assert sorted(sizes) == [4 * 100, 4 * 100, 4 * 101]


@pytest.mark.parametrize("count", [0, 2, -1])
def test_a_shard_without_bytes_is_refused(count):
    layout = received(record(GOOD, ("empty", [0, 4], "float32", 0)))
    with pytest.raises(ConfigError, match="use 1 to 1 shards"):
        layout.shards(count)


@pytest.mark.parametrize("as_memoryview", [False, True])
def test_gradients_and_weights_travel_through_a_message(as_memoryview):
    layers = model()
    (shard,) = layout_of_layers(layers).shards(1)
    parameters = dict(layers.named_parameters())
    mine = [parameters[spec.name] for spec in shard.parameters]
    for parameter in mine[1:]:
        parameter.grad = torch.randn_like(parameter)
    buffer = memoryview(bytearray(b"\xff" * shard.nbytes)) if as_memoryview else torch.ones(shard.nbytes).byte()
    views = parameter_views(shard, buffer)
    gather(mine, views)
    assert not views[0].any()
    assert all(torch.equal(view, parameter.grad) for view, parameter in zip(views[1:], mine[1:], strict=True))
    assert all(
        view.is_contiguous() and view.dtype == parameter.dtype for view, parameter in zip(views, mine, strict=True)
    )
    scatter(views, mine)
    assert all(torch.equal(view, parameter) for view, parameter in zip(views, mine, strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in mine)


def test_flat_views_and_parameter_views_are_the_same_memory():
    (shard,) = layout_of_layers(model()).shards(1)
    buffer = torch.zeros(shard.nbytes, dtype=torch.uint8)
    for number, view in enumerate(parameter_views(shard, buffer), start=1):
        view.fill_(number)
    assert sum(float(flat.sum()) for flat in flat_views(shard, buffer)) == sum(
        number * spec.elements for number, spec in enumerate(shard.parameters, start=1)
    )


def test_sparse_gradients_travel_as_dense_ones():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    view = torch.ones(5, 2)
    gather([embedding.weight], [view])
    assert view.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize(
    "buffer", [torch.zeros(63, dtype=torch.uint8), torch.zeros(64), memoryview(bytes(64)), memoryview(bytearray(65))]
)
def test_a_buffer_that_is_no_message_is_refused(buffer):
    (shard,) = received(record(GOOD)).shards(1)
    with pytest.raises(ValueError, match="message"):
        parameter_views(shard, buffer)


def test_frozen_and_unstepped_parameters_are_left_out():
    layers = model()
    layers[0].requires_grad_(requires_grad=False)
    layout = layout_of(layers.named_parameters(), [torch.optim.SGD(layers[:2].parameters(), lr=0.1)])
    assert [parameter.name for parameter in layout.parameters] == ["1.weight", "1.bias"]


def test_groups_count_up_over_all_optimizers():
    layers = model()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    layout = layout_of(layers.named_parameters(), optimizers)
    assert layout.groups == 4
    assert [parameter.group for parameter in layout.parameters] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_of_a_tied_parameter_the_first_name_counts():
    weight = torch.nn.Parameter(torch.zeros(2))
    layout = layout_of([("encoder", weight), ("decoder", weight)], [torch.optim.SGD([weight], lr=0.1)])
    assert [parameter.name for parameter in layout.parameters] == ["encoder"]


def test_what_cannot_be_trained_is_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(2))
    first, second = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    with pytest.raises(ConfigError, match="'w' is in two groups"):
        layout_of([("w", weight)], [first, second])
    with pytest.raises(ConfigError, match="in no model"):
        layout_of([], [first])
    with pytest.raises(ConfigError, match="nothing to train"):
        layout_of([("w", weight)], [])
    complex_weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'c' is complex64"):
        layout_of([("c", complex_weight)], [torch.optim.SGD([complex_weight], lr=0.1)])
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match=r"'s' is float32, torch\.sparse_coo"):
        layout_of([("s", sparse)], [torch.optim.SGD([sparse], lr=0.1)])


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        7,
        [],
        {},
        {"groups": 1},
        {"groups": 1, "parameters": []},
        {"groups": 1, "parameters": "parameters"},
        {"groups": True, "parameters": [list(GOOD)]},
        {"groups": 10**9, "parameters": [list(GOOD)]},
        {"groups": 1, "parameters": ["four"]},
        {"groups": 1, "parameters": [GOOD[:3]]},
        record(GOOD, GOOD),
        record((b"weight", [2], "float32", 0)),
        record(("w" * 10_000, [2], "float32", 0)),
        record(("w", [2], "int64", 0)),
        record(("w", [2], "complex64", 0)),
        record(("w", [2], ["float32"], 0)),
        record(("w", [2], "float32", 1)),
        record(("w", [2], "float32", -1)),
        record(("w", [2], "float32", 0.0)),
        record(("w", [2], "float32", 0), groups=0),
        record(("w", "22", "float32", 0)),
        record(("w", 4, "float32", 0)),
        record(("w", [-1], "float32", 0)),
        record(("w", [-2, -2], "float32", 0)),
        record(("w", [2.0], "float32", 0)),
        record(("w", [True], "float32", 0)),
        record(("w", [1] * 65, "float32", 0)),
        record(("w", [LARGE], "float32", 0)),
        record(("w", [0, LARGE, LARGE], "float32", 0)),
        record(("w", [2**20] * 60, "float32", 0)),
        record(("w", [10**400], "float32", 0)),
        record(("v", [LARGE // 8], "float32", 0), ("w", [LARGE // 8 + 1], "float32", 0)),
    ],
)
def test_a_malformed_layout_is_refused_before_anything_is_allocated(malformed):
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError):
            received(malformed)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_shard_layout_made_of_nothing_but_empty_parameters_beside_others_keeps_them():
    layout = received(record(GOOD, ("empty", [0, 4], "float32", 0), ("scalar", [], "float32", 0)))
    (shard,) = layout.shards(1)
    assert isinstance(shard, ShardLayout)
    shapes = [tuple(view.shape) for view in parameter_views(shard, torch.zeros(shard.nbytes, dtype=torch.uint8))]
    assert shapes == [(2, 3), (0, 4), ()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_one_element_that_is_not_finite_is_found(dtype, value, place):
    tensor = torch.linspace(-1.0, 1.0, 7, dtype=dtype)
    assert all_finite([tensor])
    tensor[place] = value
    assert not all_finite([tensor])


def test_an_empty_tensor_is_finite_and_so_are_the_largest_numbers():
    assert all_finite([torch.empty(0)])
    largest = torch.finfo(torch.float64)
    assert all_finite([torch.tensor([largest.max, largest.min], dtype=torch.float64), torch.ones(2)])

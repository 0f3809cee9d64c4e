"""The sizes of an earlier start: kept by the first worker, found by it, and used by all or by none."""

import json
import logging

import numpy as np
import pytest

from evenstep.cluster import parse_cluster
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import parse_scheme
from evenstep.worker import earlier
from evenstep.worker.agreement import hold_of
from evenstep.worker.earlier import FILE, earlier_start, first_policy, identity_of, last_sizes

SLOWNESS = np.array([1, 1, 2, 4])


def records(**changed):
    """Those of four workers, of which the first has found `earlier`."""
    earlier = changed.pop("earlier", None)
    common = {"version": "1", "parameters": 8, **changed}
    return [{**common, "identity": f"host, worker {rank}", "earlier": rank or earlier} for rank in range(4)]


def problem(epoch=0, batch=64, maximum=UNLIMITED):
    sizes = np.full(4, 2, dtype=np.int64), np.full(4, maximum, dtype=np.int64)
    return Problem(global_batch_size=batch, minimum=sizes[0], maximum=sizes[1], epoch=epoch)


def trained(name, keeper=None):
    """The sizes that a scheme ends with on workers of these speeds."""
    policy = parse_scheme(name).policy(4)
    last = None
    for number in range(300):
        allocation = policy.allocate(problem(number // 20))
        sizes = allocation.sizes
        if allocation.basis == "speed":
            if keeper is not None:
                keeper.keep(policy, changed=not np.array_equal(sizes, last))
            last = sizes
        rows = [
            (size, 1000 * each * size, 1_000_000 * each, UNLIMITED) for size, each in zip(sizes, SLOWNESS, strict=True)
        ]
        policy.observe(Reports.from_table(np.array(rows, dtype=np.int64)))
    return last


def found(folder, *, start_from=None, rank=0):
    return earlier_start(LaunchSettings(start_from=start_from), folder, rank)


@pytest.fixture(autouse=True)
def kept_at_once(monkeypatch):
    monkeypatch.setattr(earlier, "SELDOM", 0)


@pytest.fixture
def kept(tmp_path):
    """The folder of a run under lb-bsp."""
    trained("lb-bsp", last_sizes(parse_scheme("lb-bsp"), records(), LaunchSettings(), tmp_path, 0))
    return tmp_path


def first(name="lb-bsp", **changed):
    """The first sizes of each of the four workers' policies."""
    scheme, those = parse_scheme(name), records(**changed)
    return [first_policy(scheme, problem(), those, rank).allocate(problem()) for rank in range(4)]


@pytest.mark.parametrize(
    "name", ["lb-bsp", "lb-bsp:predictor=narx", "lb-bsp:tuner=solver", "lb-bsp:tuner=pairwise", "dbs"]
)
def test_every_worker_begins_with_the_last_sizes(name, tmp_path):
    last = trained(name, last_sizes(parse_scheme(name), records(), LaunchSettings(), tmp_path, 0))
    assert last.tolist() != [16] * 4
    for allocation in first(name, earlier=found(tmp_path)):
        assert allocation.basis == "speed"
        assert np.abs(allocation.sizes - last).max() <= 0.05 * 64 / 4


def test_a_policy_goes_on_from_there_as_it_would_have(kept):
    scheme = parse_scheme("lb-bsp")
    policy = first_policy(scheme, problem(), records(earlier=found(kept)), 0)
    # Until a worker has measured, what it was known for holds: no size moves.
    nothing = np.array([(size, 1000, 0, UNLIMITED) for size in policy.allocate(problem()).sizes])
    before = policy.allocate(problem()).sizes
    policy.observe(Reports.from_table(nothing))
    assert policy.allocate(problem()).sizes.tolist() == before.tolist()
    # Another global batch is shared out by the same speeds, and limits hold.
    assert np.abs(policy.allocate(problem(batch=128)).sizes - 2 * before).max() <= 2
    assert policy.allocate(problem(maximum=20)).sizes.max() <= 20


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": "2"}, "it ran evenstep 1 and this is 2"),
        ({"parameters": 9}, "its model had 8 parameters and this one has 9"),
        ({"parameters": None}, "its model had 8 parameters and this one has an unknown number of"),
        ({"scheme": "dbs"}, "its scheme was lb-bsp and this one is dbs"),
        ({"scheme": "bsp"}, "sizes do not follow speeds here"),
        ({"scheme": "ssp"}, "sizes do not follow speeds here"),
    ],
)
def test_what_does_not_fit_is_said_once_and_sizes_begin_equal(changed, why, kept, caplog):
    name = changed.pop("scheme", "lb-bsp")
    with caplog.at_level(logging.INFO, logger="evenstep"):
        for allocation in first(name, earlier=found(kept), **changed):
            assert allocation.sizes.tolist() == [16] * 4
    assert [each.getMessage() for each in caplog.records] == [
        f"sizes do not begin as the run in {kept} left them: {why}"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"setting": {}}', "SETTING", "SIZES"])
def test_a_damaged_file_is_said_once_and_sizes_begin_equal(text, kept, caplog):
    whole = json.loads((kept / FILE).read_text())
    if text == "SETTING":
        text = json.dumps({**whole, "setting": {**whole["setting"], "workers": 4}})
    elif text == "SIZES":
        text = json.dumps({**whole, "policy": {**whole["policy"], "policy": {"rates": [[1]], "sizes": 3}}})
    (kept / FILE).write_text(text)
    with caplog.at_level(logging.INFO, logger="evenstep"):
        assert all(allocation.sizes.tolist() == [16] * 4 for allocation in first(earlier=found(kept)))
    (said,) = caplog.records
    assert "sizes do not begin as the run in" in said.getMessage()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("policy", "account"), {}),
        (("policy", "used", 0), -(2**63)),
        (("policy", "experts", 0, "levels", 0), [100, -36, 0, 0]),
        (("policy", "cost", "used", 0), "seven"),
        (("policy", "losses", 0), float("nan")),
        (("setting", "parameters"), 9),
    ],
)
def test_what_was_edited_is_not_used_because_it_could_fail_later(place, value, kept, caplog):
    inner = whole = json.loads((kept / FILE).read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (kept / FILE).write_text(json.dumps(whole))
    with caplog.at_level(logging.INFO, logger="evenstep"):
        assert all(allocation.sizes.tolist() == [16] * 4 for allocation in first(earlier=found(kept)))
    (said,) = caplog.records
    assert said.getMessage().endswith(f"{FILE} is damaged, or was edited")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_text("[" * 200_000), "is damaged: it is not JSON"),
        (lambda path: path.write_bytes(b"\xff\x00"), "is damaged: it is not JSON"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read: it is not a regular file"),
        (lambda path: path.unlink() or path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_read_is_said(spoil, why, kept, caplog):
    spoil(kept / FILE)
    with caplog.at_level(logging.INFO, logger="evenstep"):
        found_there = earlier_start(LaunchSettings(start_from=str(kept)), None, 0)
        assert all(allocation.sizes.tolist() == [16] * 4 for allocation in first(earlier=found_there))
    (said,) = caplog.records
    assert said.getMessage() == f"sizes do not begin as the run in {kept} left them: {FILE} {why}"


def test_the_first_worker_alone_looks_and_keeps(kept, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    assert found(kept, rank=1) is None
    assert last_sizes(parse_scheme("lb-bsp"), records(), LaunchSettings(), kept, 1) is None
    assert found(other) is None
    assert found(other, start_from=str(kept))["folder"] == str(kept)
    # What the user named is told of, and what a restart finds in its launcher's folder counts before that.
    assert found(None, start_from=str(other)) == {"folder": str(other), "given": True, "kept": None}
    restarted = LaunchSettings(start_from=str(other), marks=str(kept))
    assert earlier_start(restarted, other, 0)["folder"] == str(kept)


def test_a_folder_that_is_gone_keeps_nothing(tmp_path):
    trained("lb-bsp", last_sizes(parse_scheme("lb-bsp"), records(), LaunchSettings(), tmp_path / "gone", 0))
    assert not (tmp_path / "gone").exists()


def test_an_emulated_device_is_another_device():
    cluster = '[devices.d]\nper_sample = "{} ms"\n[[workers]]\ndevice = "d"\ncount = 2\n'
    holds = [hold_of(parse_cluster(cluster.format(each)), LaunchSettings(), rank=0, workers=2)[0] for each in (1, 1, 2)]
    one, same, other = (identity_of("host", hold) for hold in holds)
    assert one == same != other
    assert identity_of("host", None) == "host"

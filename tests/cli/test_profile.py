import json
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.cluster import parse_cluster

SCRIPTS = Path(__file__).parent / "scripts"
DEVICE = """
[devices.old]
fixed = "20 ms"
per_sample = "2 ms"
memory = "200 MB"
memory_fixed = "20 MB"
memory_per_sample = "10 MB"
[[workers]]
device = "old"
"""


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_profile_of_a_device_is_a_cluster_file_that_describes_it(tmp_path, capsys):
    device, cluster = (tmp_path / name for name in ("device.toml", "cluster.toml"))
    device.write_text(DEVICE)
    options = ["--emulate", device, "--cluster", cluster, "--count", 3, "--json"]
    assert main(["profile", *map(str, options), str(SCRIPTS / "trains.py"), "12"]) == 0
    profile = json.loads(capsys.readouterr().out)
    # What fits is learnt: 18 samples, of which 5 % of the memory stay free.
    assert [point["samples"] for point in profile["points"]] == [1, 2, 3, 4, 6, 8, 12, 16]
    for point in profile["points"]:
        assert 0.02 + 0.002 * point["samples"] == pytest.approx(point["seconds"], rel=0.3)
        assert point["peak_bytes"] == (20 + 10 * point["samples"]) * 10**6
    assert profile["knee"] == 16
    described = parse_cluster(cluster.read_text())
    assert len(described) == 3
    assert described.memory(0).largest_batch == 18
    seconds = described.disturbance().seconds(worker=2, iteration=0, batch_size=32, natural_seconds=0.0, now=0.0)
    assert seconds == pytest.approx(0.084, rel=0.3)
    assert main(["simulate", str(cluster), "--schemes", "bsp", "--batch-size", "8", "--json"]) == 0


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_script_that_fails_is_an_error(tmp_path, capfd):
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no data')\n")
    assert main(["profile", str(script)]) == 2
    error = capfd.readouterr().err
    assert "RuntimeError: no data" in error
    assert f"evenstep: {script} ended before two batch sizes were measured" in error


@pytest.mark.alone
@pytest.mark.multiprocess
def test_a_function_that_is_over_too_soon_and_nothing_that_it_keeps(tmp_path, tmp_path_factory, capfd):
    device = tmp_path_factory.mktemp("device") / "device.toml"
    device.write_text('[devices.one]\nper_sample = "2 ms"\nfixed = "20 ms"\n[[workers]]\ndevice = "one"\n')
    (tmp_path / "checkpoints").mkdir()
    options = ["--json", "--emulate", str(device), "--cluster", "/dev/full"]
    assert main(["profile", *options, f"{SCRIPTS / 'keeps.py'}:train", str(tmp_path)]) == 2
    said = capfd.readouterr()
    # What was measured is told first, and what cannot be written then is an error.
    assert [point["samples"] for point in json.loads(said.out)["points"]][:2] == [1, 2]
    assert "keeps.py:train was over before larger batches were measured" in said.err
    assert said.err.endswith("evenstep: /dev/full cannot be written (No space left on device): give another path\n")
    # Neither events nor checkpoints of the script's own.
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


@pytest.mark.alone
@pytest.mark.multiprocess
def test_iterations_that_take_unlike_times_are_doubted(tmp_path, capfd):
    cluster = tmp_path / "cluster.toml"
    options = ["--largest", "4", "--cluster", str(cluster), "--json"]
    code = main(["profile", *options, str(SCRIPTS / "stumbles.py")])
    said = capfd.readouterr()
    profile = json.loads(said.out)
    assert all(point["spread"] > 0.4 for point in profile["points"])
    assert profile["doubt"].endswith("something else ran on this machine, so profile again when it is idle")
    assert f"evenstep: {profile['doubt']}\n" in said.err
    if code:  # Larger batches that took less time make no cluster file.
        assert "take less time the larger the batch" in said.err
    else:
        assert profile["doubt"] in cluster.read_text()
        parse_cluster(cluster.read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.py"], "there is no script 'none.py'"),
        (["--largest", "1", __file__], "--largest must be at least 2, not 1"),
        (["--count", "0", __file__], "--count must be at least 1, not 0"),
        (["--name", "my device", __file__], "--name must be made of letters, digits, - and _, not 'my device'"),
    ],
)
def test_a_wrong_wish_is_an_error_of_one_sentence(options, message, capsys):
    assert main(["profile", *options]) == 2
    assert message in capsys.readouterr().err

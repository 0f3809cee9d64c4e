"""`evenstep run --find-batch`: each worker's largest batch, in the script's own loop, and the next start with it."""

import json
import re
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.launch.found_batch import FILE, FoundBatch
from evenstep.worker.device_memory import HostMemory

pytestmark = pytest.mark.multiprocess
SCRIPT = str(Path(__file__).parent / "scripts" / "finds.py")
DEVICES = """
[devices.large]
per_sample = "0.2 ms"
fixed = "5 ms"
memory = "2100 MB"
memory_fixed = "100 MB"
memory_per_sample = "50 MB"
[devices.small]
per_sample = "0.2 ms"
fixed = "5 ms"
memory = "1100 MB"
memory_fixed = "100 MB"
memory_per_sample = "50 MB"
[[workers]]
device = "large"
[[workers]]
device = "small"
"""


@pytest.fixture
def devices(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES)
    return str(path)


def test_unlike_devices_are_filled_in_the_next_start(tmp_path, devices, capfd):
    folder = str(tmp_path / "run")
    options = ["run", "--workers", "2", "--emulate", devices, "--run-dir", folder]
    assert main([*options, "--find-batch", SCRIPT, "plain"]) == 0
    said = capfd.readouterr().out
    found = FoundBatch.read(Path(folder))
    # 5 % of each memory stay free.
    assert [each.holds for each in found.workers] == [37, 18]
    assert [each.memory_bytes for each in found.workers] == [2100 * 10**6, 1100 * 10**6]
    # The largest that, shared out by the measured speeds, both hold: the small one limits it at equal speeds.
    together = sum(each.samples_per_second for each in found.workers)
    most = min(each.holds * together / each.samples_per_second for each in found.workers)
    assert most - 2 <= found.global_batch_size <= most + 1
    assert f"a global batch of {found.global_batch_size} samples uses every device fully" in said
    assert "all hold 55" in said
    assert re.search(r"0 +\S+, emulated +2\.1 GB +37 ", said)
    assert "sizes [" in said  # The script's own output stays.

    assert main([*options, SCRIPT, "auto"]) == 0
    lines = re.findall(r"sizes (\[.*\]) of (\d+)", capfd.readouterr().out)
    assert {int(whole) for _, whole in lines} == {found.global_batch_size}
    assert max(json.loads(sizes)[1] for sizes, _ in lines) <= 20


def test_devices_that_hold_more_than_was_tried_are_not_said_to_be_full(tmp_path, devices, capfd):
    options = ["run", "--workers", "2", "--emulate", devices, "--find-batch", "--largest", "4"]
    assert main([*options, SCRIPT, "plain"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"a global batch of \d samples fits, with sizes by speed; all hold 8 or more\n", said)


def test_padded_batches_are_found_by_cost(tmp_path, devices, capfd):
    options = ["run", "--workers", "2", "--emulate", devices, "--find-batch", "--json"]
    assert main([*options, SCRIPT, "padded"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["by_cost"]
    # No batch of whole samples costs exactly what fits.
    for worker, fits in zip(found["workers"], (37, 18), strict=True):
        assert 0.6 * fits <= worker["holds"] <= fits


def test_a_limit_of_addresses_is_learned_and_kept(tmp_path, capfd):
    options = ["run", "--workers", "2", "--find-batch", "--json", "--largest", "4096"]
    assert main([*options, SCRIPT, "plain", "2000"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    # At least 0.5 MB a sample; some are kept free, and threads of the communication and their arenas take others.
    for worker in found["workers"]:
        assert 50 < worker["holds"] < 4000
        assert not worker["more"]


@pytest.mark.parametrize(("names", "limit"), [(("memory.max", "memory.current"), "max"), (("a", "b"), "max")])
def test_a_group_without_a_limit_leaves_the_machine_as_the_limit(tmp_path, names, limit):
    assert HostMemory(root=group(tmp_path, names, limit)).capacity_bytes > 10**7


def test_a_control_group_limits_the_memory_which_its_workers_share(tmp_path):
    root = group(tmp_path, ("memory.max", "memory.current"), str(10 * 10**6))
    one, two = HostMemory(root=root), HostMemory(2, root=root)
    # 4 MB are taken, of which 1 MB are pages of files.
    assert one.capacity_bytes - one.base_bytes == 7 * 10**6
    assert two.capacity_bytes - two.base_bytes == 3.5 * 10**6


def group(root, names, limit):
    folder = root / "sys/fs/cgroup/jobs/mine"
    folder.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    for name, content in zip(names, (limit, str(4 * 10**6)), strict=True):
        (folder / name).write_text(f"{content}\n")
    (folder / "memory.stat").write_text("anon 3000000\ninactive_file 1000000\n")
    return root


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "holds nothing that was found: run it first, with the same run directory"),
        ("{", "run evenstep run --find-batch again"),
        ('{"workers": [], "global_batch_size": 8}', "was found for other workers, or with other costs"),
    ],
)
def test_auto_without_what_was_found_is_one_sentence(tmp_path, capfd, kept, said):
    if kept is not None:
        (tmp_path / FILE).write_text(kept)
    assert main(["run", "--run-dir", str(tmp_path), SCRIPT, "auto"]) != 0
    assert said in capfd.readouterr().err


def test_auto_without_a_run_directory_is_one_sentence(capfd):
    assert main(["run", SCRIPT, "auto"]) != 0
    assert "and no run_dir was given" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--find-batch", "--largest", "0", SCRIPT], "--largest must be at least 1, not 0"),
        (["--find-batch", "--resume", "somewhere", SCRIPT], "--find-batch trains nothing"),
    ],
)
def test_wrong_options_are_one_sentence(options, said, capsys):
    assert main(["run", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_is_over_too_soon_is_told(tmp_path, capfd):
    script = tmp_path / "short.py"
    script.write_text("print('nothing to train')\n")
    assert main(["run", "--find-batch", str(script)]) == 2
    assert "ended before the largest batches were found: it must call evenstep.prepare" in capfd.readouterr().err

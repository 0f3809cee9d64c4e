"""`evenstep plan` with a script: measures the workers in its own loop, and the next start knows what they hold."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from support.started import Started, evenstep, script
from torch.distributed import TCPStore

from evenstep.cli.main import main
from evenstep.cluster import parse_cluster
from evenstep.launch.survey import FILE, Survey
from evenstep.worker.device_memory import HostMemory

pytestmark = pytest.mark.multiprocess
SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = str(SCRIPTS / "finds.py")
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
SPEEDS = """
[devices.new]
per_sample = "1 ms"
[devices.old]
per_sample = "4 ms"
[[workers]]
device = "new"
count = 2
[[workers]]
device = "old"
"""


@pytest.fixture
def devices(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES)
    return str(path)


@pytest.fixture
def speeds(tmp_path):
    path = tmp_path / "speeds.toml"
    path.write_text(SPEEDS)
    return str(path)


def planned(capfd, *words):
    """The plan, as JSON."""
    assert main(["plan", "--json", *map(str, words)]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def test_unlike_devices_are_filled_in_the_next_start(tmp_path, devices, capfd):
    folder = str(tmp_path / "run")
    options = ["--workers", "2", "--emulate", devices, "--run-dir", folder]
    assert main(["plan", *options, "--", SCRIPT, "plain"]) == 0
    said = capfd.readouterr().out
    survey = Survey.read(Path(folder))
    # 5 % of each memory stay free.
    assert [each.holds for each in survey.workers] == [37, 18]
    assert [each.memory_bytes for each in survey.workers] == [2100 * 10**6, 1100 * 10**6]
    # The largest that, shared out by the measured speeds, both hold: the small one limits it at equal speeds.
    together = sum(each.samples_per_second for each in survey.workers)
    most = min(each.holds * together / each.samples_per_second for each in survey.workers)
    assert most - 2 <= survey.largest_global_batch <= most + 1
    assert f"A global batch of {survey.largest_global_batch} samples uses every device fully" in said
    assert "all hold 55" in said
    assert re.search(r"0 +\S+ +emulated +2\.1 GB +37 ", said)
    assert "sizes [" in said  # The script's own output stays.
    # The script's batches of 300 do not fit, so the plan is for what does.
    assert survey.global_batch_size == survey.largest_global_batch

    assert main(["run", *options, SCRIPT, "auto"]) == 0
    lines = re.findall(r"sizes (\[.*\]) of (\d+)", capfd.readouterr().out)
    assert {int(whole) for _, whole in lines} == {survey.largest_global_batch}
    assert max(json.loads(sizes)[1] for sizes, _ in lines) <= 20


def test_devices_that_hold_more_than_was_tried_are_not_said_to_be_full(devices, capfd):
    assert main(["plan", "--workers", "2", "--emulate", devices, "--largest", "4", "--", SCRIPT, "plain"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"A global batch of \d samples fits, with sizes by speed; all hold 8 or more\.", said)


def test_padded_batches_are_found_by_cost(devices, capfd):
    plan = planned(capfd, "--workers", 2, "--emulate", devices, "--", SCRIPT, "padded")
    assert plan["by_cost"]
    # No batch of whole samples costs exactly what fits.
    for worker, fits in zip(plan["workers"], (37, 18), strict=True):
        assert 0.6 * fits <= worker["holds"] <= fits


def test_a_limit_of_addresses_is_learned_and_kept(capfd, monkeypatch):
    # Each further arena of the C library takes 64 MB of addresses, as many of them as threads happen to meet; and
    # blocks below 32 MB would share one heap, whose gaps after some iterations can keep out what fitted before.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    plan = planned(capfd, "--workers", 2, "--", SCRIPT, "plain", 250)
    # At least 0.5 MB a sample; some are kept free, and threads of the communication take others.
    for worker in plan["workers"]:
        assert 16 < worker["holds"] < 1000
        assert not worker["more"]


def test_a_slow_worker_is_found_and_the_gain_told_from_the_folder_again(tmp_path, speeds, capfd):
    folder = tmp_path / "run"
    options = ("--workers", 3, "--emulate", speeds, "--run-dir", folder, "--largest", 64)
    plan = planned(capfd, *options, "--", SCRIPTS / "trains.py", 12)
    assert plan["global_batch_size"] == 36
    assert [worker["device"] for worker in plan["workers"]] == ["emulated"] * 3
    assert all(len(worker["seconds"]) >= 50 for worker in plan["workers"])
    assert plan["workers"][0]["samples_per_second"] > 2 * plan["workers"][2]["samples_per_second"]
    assert plan["pick"] == "lb-bsp"
    assert plan["why"][0].startswith("Worker 2 is a steady")
    assert plan["gradient_bytes"] == 4 * 5
    again = planned(capfd, folder, "--schemes", "lb-bsp")
    assert again["schemes"] == plan["schemes"][:2]


@pytest.mark.alone
def test_one_workers_device_becomes_a_cluster_file_that_describes_it(tmp_path, capfd):
    device, cluster = (tmp_path / name for name in ("device.toml", "cluster.toml"))
    device.write_text(
        '[devices.old]\nfixed = "20 ms"\nper_sample = "2 ms"\nmemory = "200 MB"\nmemory_fixed = "20 MB"\n'
        'memory_per_sample = "10 MB"\n[[workers]]\ndevice = "old"\n'
    )
    plan = planned(capfd, "--emulate", device, "--save-cluster", cluster, "--", SCRIPTS / "trains.py", 12)
    assert "pick" not in plan
    (worker,) = plan["workers"]
    # What fits is learnt: 18 samples, of which 5 % of the memory stay free.
    assert worker["holds"] == 17
    assert [samples for samples, _ in worker["points"]][:3] == [1, 2, 4]
    for samples, seconds in worker["points"]:
        assert 0.02 + 0.002 * samples == pytest.approx(seconds, rel=0.3)
    described = parse_cluster(cluster.read_text())
    assert described.largest_batch(0) == 17
    seconds = described.disturbance().seconds(worker=0, iteration=0, batch_size=32, natural_seconds=0.0)
    assert seconds == pytest.approx(0.084, rel=0.3)
    assert main(["simulate", str(cluster), "--schemes", "bsp", "--batch-size", "8", "--json"]) == 0


def test_one_worker_has_a_speed_and_nothing_to_compare(capfd):
    assert main(["plan", "--largest", "512", "--", str(SCRIPTS / "trains.py"), "12"]) == 0
    said = capfd.readouterr()
    # Which nobody wants to train with, although the worker holds it.
    assert "A global batch of 240 samples is the whole data set, and fits" in said.out
    assert "To train with it" not in said.out
    assert "One worker waits for no other: give --workers to compare schemes." in said.out
    assert "trains.py at ever larger batches; what it trains is not kept" in said.err


def test_nothing_is_kept_and_what_was_measured_is_told_before_a_file_that_cannot_be_written(tmp_path, capfd):
    (tmp_path / "checkpoints").mkdir()
    words = ["plan", "--json", "--largest", "16", "--save-cluster", "/dev/full", "--", str(SCRIPTS / "keeps.py")]
    assert main([*words, str(tmp_path)]) == 2
    said = capfd.readouterr()
    assert json.loads(said.out)["workers"][0]["points"][0][0] == 1
    assert said.err.endswith("evenstep: /dev/full cannot be written (No space left on device): give another path\n")
    # Neither events nor checkpoints of the script's own.
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_of_two_nodes_the_one_with_worker_0_prints_the_plan_of_both(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(SPEEDS.replace("count = 2\n", ""))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    words = ["plan", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}"]
    words += ["--rdzv-conf", "is_host=false", "--local-addr", "localhost", "--emulate", cluster, "--largest", 32]
    first, second = (Started(evenstep, *words, "--", SCRIPTS / "trains.py", 12) for _ in range(2))
    with first, second:
        outputs = [first.communicate(), second.communicate()]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    (plan,) = [out for out, _ in outputs if out]
    assert "(node 0)" in plan
    assert "(node 1)" in plan
    assert "Use lb-bsp: +" in plan
    assert sum("worker 0 is on another host" in error for _, error in outputs) == 1


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


EMPTY = {
    "workers": [],
    "global_batch_size": 8,
    "largest_global_batch": 8,
    "by_cost": False,
    "iteration_seconds": 0.0,
    "gradient_bytes": 0,
}


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "holds nothing that was measured: run it first, with the same run directory"),
        ("{", "measure again with evenstep plan"),
        (json.dumps(EMPTY), "was measured of other workers, or with other costs"),
    ],
)
def test_auto_without_what_was_measured_is_one_sentence(tmp_path, kept, said):
    if kept is not None:
        (tmp_path / FILE).write_text(kept)
    assert said in refused_auto({"EVENSTEP_RUN_DIR": str(tmp_path)})


def test_auto_without_a_run_directory_is_one_sentence():
    assert "and no run_dir was given" in refused_auto({})


def refused_auto(environment):
    with Started(script, SCRIPT, "auto", environment=environment) as process:
        _, error = process.communicate()
    assert process.returncode != 0
    return error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs a run directory, a cluster file, or a script after --"),
        (["--"], "needs a training script after the --"),
        ([SCRIPT], "finds.py is not a run directory: if it is a script, put -- before it"),
        (["--workers", "2", SCRIPT, "plain"], "put -- before it"),
        (["--", "none.py"], "there is no script 'none.py'"),
        (["--largest", "0", "--", SCRIPT], "--largest must be at least 1, not 0"),
        (["--largest", "8", "runs/a"], "--largest is for a script, which stands after --"),
        (["--save-cluster", "a.toml", "b.toml"], "--save-cluster is for a script"),
        (["--scheme", "bsp", "--", SCRIPT], "has no --scheme: it tries sizes of its own"),
        (["--resume", "runs/a", "--", SCRIPT], "has no --resume"),
        (["--framework", "jax", "--", SCRIPT], "has no --framework"),
        (["--workers", "no", "--", SCRIPT], "--workers must be a number"),
    ],
)
def test_wrong_options_are_one_sentence(options, said, capsys):
    assert main(["plan", *options]) == 2
    assert said in capsys.readouterr().err


def test_what_stands_after_the_script_is_its_own(tmp_path, capfd):
    takes = tmp_path / "takes.py"
    takes.write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["plan", "--", str(takes), "--largest", "3", "--c"]) == 2
    said = capfd.readouterr()
    assert said.out == "['--largest', '3', '--c']\n"
    assert "ended before enough was measured: it must call evenstep.prepare" in said.err


def test_a_script_that_fails_is_told_with_its_error(tmp_path, capfd):
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no data')\n")
    assert main(["plan", "--", str(script)]) == 1
    error = capfd.readouterr().err
    assert "RuntimeError: no data" in error
    assert error.splitlines()[-1].startswith("evenstep: worker 0 ended with exit code 1")

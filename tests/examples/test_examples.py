"""The examples run, alone and under torchrun, and the two DDP scripts differ by what the README says."""

import difflib
import re
from pathlib import Path

import pytest
from first_contact import CASES, said, typed
from support import examples
from support.faults import meeting_place
from support.processes import results, run_workers
from support.started import Started, script, torchrun

from evenstep.cluster import parse_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {
    "ddp_plain.py": ("--epochs", "1"),
    "ddp_evenstep.py": ("--epochs", "1"),
    "fsdp.py": ("--epochs", "1", "--width", "32", "--blocks", "2"),
    "mesh.py": ("--epochs", "1", "--width", "32"),
    "pipeline.py": ("--epochs", "2", "--width", "32", "--slow", "4"),
    "torchtitan_loop.py": ("--epochs", "1", "--layers", "1", "--sequences", "64"),
    "images.py": ("--epochs", "2", "--batch-size", "32", "--amp", "bfloat16"),
    "gpt.py": ("--steps", "10", "--batch-size", "2", "--context", "32"),
    "lengths.py": ("--epochs", "1", "--longest", "60", "--batch-size", "64", "--width", "16"),
    "own_batches.py": ("--steps", "10", "--batch-size", "2", "--context", "16"),
    "rollouts.py": ("--steps", "5", "--rollouts", "16"),
    "char_lm.py": ("--iterations", "3", "--report-every", "1", "--global-batch-size", "8", "--width", "32"),
}


def run_example(name, workers=1, *, options=None, **environment):
    """What worker 0 prints; the processes are forked, and meet as under torchrun."""
    chosen = [str(option) for option in (SHORT[name] if options is None else options)]
    return results(
        run_workers(examples.run, workers, str(EXAMPLES / name), chosen, environment=meeting_place() | environment)
    )[0]


def test_the_ddp_scripts_differ_by_the_import_and_one_line():
    plain, ours = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_plain.py", "ddp_evenstep.py"))
    changes = [line for line in difflib.ndiff(plain, ours) if line[:2] in ("+ ", "- ")]
    assert [line for line in changes if line.strip() != "+"] == [
        "+ import evenstep",
        "+     model, optimizer, loader = evenstep.prepare(model, optimizer, loader)",
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("command", "name"),
    [((script,), "ddp_plain.py"), ((torchrun, "--standalone", "--nproc-per-node", 2), "ddp_evenstep.py")],
)
def test_digits_as_a_command(command, name):
    with Started(*command, EXAMPLES / name, *SHORT[name], environment={"OMP_NUM_THREADS": "1"}) as process:
        printed, error = process.communicate()
    assert process.returncode == 0, error
    assert printed.startswith("epoch 1: test accuracy ")


@pytest.mark.multiprocess
def test_character_language_model():
    lines = run_example("char_lm.py", 2).splitlines()
    assert lines[0].startswith("iteration 1: ")
    assert lines[0].endswith("bits per character, batch sizes [4, 4]")
    assert lines[-2].startswith("on text held out: ")
    assert lines[-1].startswith("it writes: 'def ")


@pytest.mark.multiprocess
def test_a_sharded_model():
    assert run_example("fsdp.py", 2).startswith("epoch 1: test accuracy ")


@pytest.mark.multiprocess
def test_replicas_of_two_processes():
    assert run_example("mesh.py", 4).startswith("epoch 1: test accuracy ")


@pytest.mark.multiprocess
def test_pipelines_of_two_stages():
    line = re.compile(r"epoch \d: loss ([\d.]+), batch sizes \[(\d+), (\d+)\]")
    first, second = (line.fullmatch(each).groups() for each in run_example("pipeline.py", 4).splitlines())
    assert float(second[0]) < float(first[0])
    assert [sum(map(int, each[1:])) for each in (first, second)] == [256, 256]
    assert not any(int(size) % 8 for size in second[1:])


@pytest.mark.multiprocess
def test_a_model_that_torchtitan_splits_learns_the_same_with_unequal_batches():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install torchtitan==0.3.0 triton")
    line = re.compile(r"epoch 1: loss ([\d.]+), batch sizes (.+)\n")
    (equal, _), (unequal, sizes) = (
        line.fullmatch(run_example("torchtitan_loop.py", 4, EVENSTEP_BATCH_SIZES=sizes)).groups()
        for sizes in ("rank:0=8,rank:1=8", "rank:0=11,rank:1=5")
    )
    assert float(unequal) == pytest.approx(float(equal), abs=2e-3)
    assert sizes == "[11, 5]"


@pytest.mark.multiprocess
def test_resuming(tmp_path):
    first = run_example("resume.py", options=("--epochs", "1", "--checkpoints", tmp_path))
    assert first.startswith("from the beginning, in epoch 1\nepoch 1: test accuracy ")
    # An epoch has 12 iterations, of which the second start repeats two.
    second = run_example("resume.py", options=("--epochs", "2", "--checkpoints", tmp_path)).splitlines()
    assert second[0] == f"from {tmp_path}/checkpoint-000002, in epoch 1"
    assert [line.partition(":")[0] for line in second[1:]] == ["epoch 1", "epoch 2"]


@pytest.mark.multiprocess
def test_images():
    lines = run_example("images.py", 2).splitlines()
    losses = [
        float(re.fullmatch(r"epoch \d: training loss ([\d.]+), test accuracy [\d.]+%", each)[1]) for each in lines
    ]
    assert losses[1] < 1.2 < losses[0]


@pytest.mark.multiprocess
def test_gpt():
    (line,) = run_example("gpt.py", 2).splitlines()
    found = re.fullmatch(r"step 10: [\d.]+ bits per character, batch sizes \[(\d), (\d)\]", line)
    assert int(found[1]) + int(found[2]) == 4  # How they are shared depends on how busy this machine is.


@pytest.mark.multiprocess
def test_batches_of_the_scripts_own():
    (line,) = run_example("own_batches.py", 2).splitlines()
    found = re.fullmatch(r"step 10: [\d.]+ bits per character, batch sizes \[(\d), (\d)\]", line)
    assert int(found[1]) + int(found[2]) == 4


@pytest.mark.multiprocess
def test_texts_of_unequal_length():
    (line,) = run_example("lengths.py", 2).splitlines()
    assert re.fullmatch(r"epoch 1: [\d.]+ bits per character, batch sizes \[\d+, \d+\]", line)


@pytest.mark.multiprocess
def test_rollouts_that_are_divided_train_as_in_one_process():
    line = re.compile(r"step 5: loss (-?[\d.]+), tokens \[(.+)\], [\d.]+ times as long as the fastest\n")
    alone, together = (line.fullmatch(run_example("rollouts.py", workers)) for workers in (1, 2))
    assert float(alone[1]) == pytest.approx(float(together[1]), abs=2e-4)
    assert int(alone[2]) == sum(map(int, together[2].split(", ")))


@pytest.mark.alone
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["readme", "numpy_balancer"])
def test_the_slow_worker_gets_less_and_the_run_says_what_that_gained(name):
    told = said(typed(*CASES[name]))
    before, after = told["sizes"]
    assert after[1] < before[1]
    assert told["interval"][1] > 1, told["said"]


def test_every_command_that_first_contact_types_stands_on_its_page():
    assert all(command in (EXAMPLES.parent / page).read_text() for page, command in CASES.values())


@pytest.mark.parametrize(
    "name", ["images.py", "gpt.py", "fsdp.py", "mesh.py", "resume.py", "lengths.py", "own_batches.py", "rollouts.py"]
)
def test_an_example_can_be_read_at_a_glance(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


def test_the_cluster_file_describes_four_workers():
    assert len(parse_cluster((EXAMPLES / "cluster.toml").read_text())) == 4

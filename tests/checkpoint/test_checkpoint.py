"""A run goes on from a checkpoint as if nothing had happened, on any number of workers."""

import gc
import json
import os
import resource
import shutil
import signal
import stat
import warnings
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support import checkpoints, training
from support.processes import results, run_workers
from support.training import Run

import evenstep
from evenstep.checkpoint.folder import CheckpointFolder, DamagedError, manifest_of, read_of

# 15 a slice: 5 whole ones and one of 7 in each epoch.
LENGTH = {"samples": 82, "epochs": 3}


def close(values, expected):
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("optimizer", "before", "after", "save_at"),
    [("momentum", 3, 2, 8), ("adam", 2, 4, 3), ("adam", 3, 1, 6)],
)
def test_a_run_goes_on_in_mid_epoch_on_another_number_of_workers(tmp_path, optimizer, before, after, save_at):
    run = Run(scripted=3, optimizer=optimizer, global_batch_size=15, **LENGTH)
    results(run_workers(checkpoints.train_saving, before, run, tmp_path, {save_at}))
    run = Run(scripted=17, optimizer=optimizer, global_batch_size=15, **LENGTH)
    if after == 1:
        values = [checkpoints.train_restored(run, tmp_path)]
    else:
        values = results(run_workers(checkpoints.train_restored, after, run, tmp_path))
    # Each sample once: as many iterations as are left, and the trajectory of one undisturbed process.
    assert values[0]["iterations"] == 18 - save_at
    assert values[0]["epochs"] == list(range((save_at - 1) // 6, 3))
    close(values, training.train_alone(run, 15))


def test_all_loaders_of_a_session_go_on(tmp_path):
    run = Run(samples=20, batch_size=4, epochs=3)
    checkpoints.train_in_turn(run, tmp_path, stop=True)
    assert checkpoints.train_in_turn(run, tmp_path, go_on=True) == checkpoints.train_in_turn(run, tmp_path)


@pytest.mark.multiprocess
def test_the_global_batch_of_the_checkpoint_wins(tmp_path):
    results(run_workers(checkpoints.train_saving, 3, Run(scripted=3, **LENGTH), tmp_path, {8}))
    values = results(run_workers(checkpoints.train_restored, 2, Run(scripted=3, **LENGTH), tmp_path))
    close(values, training.train_alone(Run(**LENGTH), 15))


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["lb-bsp:predictor=narx", "lb-bsp:tuner=pairwise"])
def test_what_was_learnt_of_speeds_and_sizes_is_kept(tmp_path, scheme):
    run = Run(scheme=scheme, batch_size=8, samples=96, epochs=3)
    saved = results(run_workers(checkpoints.train_saving, 2, run, tmp_path, {10}))
    found = results(run_workers(checkpoints.train_restored, 2, run, tmp_path))
    assert [value["forecaster"] for value in found] == [value["forecaster"] for value in saved]
    assert [value["policy"] for value in found] == [value["policy"] for value in saved]
    # Sizes that follow from comparisons alone need no estimates.
    assert (saved[0]["forecaster"] != saved[1]["forecaster"]) == ("narx" in scheme)


@pytest.mark.multiprocess
def test_models_that_train_apart_become_one_first(tmp_path):
    run = Run(scheme="local-sgd:period=4", **LENGTH)
    saved = results(run_workers(checkpoints.train_saving, 3, run, tmp_path, {6}))
    assert saved[0]["weights"] == saved[1]["weights"] == saved[2]["weights"]
    results(run_workers(checkpoints.train_restored, 2, run, tmp_path))


@pytest.mark.multiprocess
@pytest.mark.parametrize("after", [1, 3])
def test_what_the_optimizer_has_not_stepped_on_comes_again(tmp_path, after):
    run = Run(scripted=4, samples=90, epochs=2, accumulate=3, global_batch_size=15)
    run_workers(checkpoints.train_accumulating, 2, run, tmp_path, 5)
    if after == 1:
        values = [single_process(checkpoints.train_accumulating, run, tmp_path)]
    else:
        values = results(run_workers(checkpoints.train_accumulating, after, run, tmp_path))
    close(values, training.train_alone(run, 15))


def single_process(function, *arguments):
    (value,) = results(run_workers(function, 1, *arguments))
    return value


@pytest.mark.multiprocess
def test_schedulers_averages_and_dropout_go_on(tmp_path):
    run = Run(scheme="bsp", **LENGTH)  # A worker's dropout depends on its sizes.
    undisturbed = results(run_workers(checkpoints.train_with_extras, 2, run, tmp_path, 8))
    restored = results(run_workers(checkpoints.train_with_extras, 2, run, tmp_path))
    assert restored == undisturbed
    assert restored[0]["rate"] == pytest.approx(0.05 * 0.5**9)


@pytest.mark.multiprocess
def test_states_that_are_cut_over_the_workers_go_on_on_another_number_of_them(tmp_path):
    run = Run(scripted=3, optimizer="adam", global_batch_size=15, **LENGTH)
    results(run_workers(checkpoints.train_with_states_cut_over_the_workers, 3, run, tmp_path, 8))
    values = results(run_workers(checkpoints.train_with_states_cut_over_the_workers, 2, run, tmp_path))
    close(values, training.train_alone(run, 15))


@pytest.mark.multiprocess
def test_a_worker_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path):
    run = Run(scripted=3, global_batch_size=15, **LENGTH)
    outcomes = run_workers(checkpoints.die_while_saving, 3, run, tmp_path, 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("WorkerLostError: a checkpoint, which all workers save and restore together")
        assert "those before it are whole: worker 1 ended, died, stopped" in outcome.error
    values = results(run_workers(checkpoints.train_restored, 2, run, tmp_path))
    assert values[0]["name"] == "checkpoint-000001"
    close(values, training.train_alone(run, 15))


@pytest.mark.multiprocess
def test_a_checkpoint_that_workers_write_while_training_goes_on_can_be_restored(tmp_path):
    run = Run(scripted=3, optimizer="adam", global_batch_size=15, **LENGTH)
    save = partial(checkpoints.train_saving, leave=False, asynchronous=True)
    close(results(run_workers(save, 3, run, tmp_path, {2, 4, 8})), training.train_alone(run, 15))
    values = results(run_workers(checkpoints.train_restored, 2, run, tmp_path))
    assert (values[0]["name"], values[0]["iterations"]) == ("checkpoint-000003", 10)
    close(values, training.train_alone(run, 15))


@pytest.mark.multiprocess
def test_a_worker_that_dies_while_a_thread_writes_leaves_the_checkpoint_before(tmp_path):
    run = Run(scripted=3, global_batch_size=15, **LENGTH)
    outcomes = run_workers(checkpoints.die_while_writing, 3, run, tmp_path, 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("WorkerLostError: ")
        assert "worker 1" in outcome.error
    values = results(run_workers(checkpoints.train_restored, 2, run, tmp_path))
    assert values[0]["name"] == "checkpoint-000001"
    close(values, training.train_alone(run, 15))


@pytest.mark.multiprocess
def test_a_folder_that_cannot_be_written_is_an_error_on_all(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    outcomes = results(run_workers(checkpoints.save_where_nothing_can_be, 2, Run(**LENGTH), tmp_path / "file" / "in"))
    assert outcomes[0].startswith("the checkpoint failed (")
    assert outcomes[1].startswith("worker 0: the checkpoint failed (")


@pytest.mark.multiprocess
def test_what_one_worker_cannot_save_ends_nobody_in_a_wait(tmp_path):
    first, second = results(run_workers(checkpoints.save_what_one_cannot, 2, Run(**LENGTH), tmp_path))
    assert first[0].startswith("ConfigError: the state of the extra 'odd' holds more than")
    assert second[0].startswith("CheckpointError: worker 0: the state of the extra 'odd' holds more than")
    for said in (first[1], second[1]):
        assert said.startswith(
            'DisagreementError: worker 1 has the extras ["own"] where worker 0 has []: save the same'
        )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


# In a single process.


ALONE = Run(samples=60, epochs=2, global_batch_size=10)


def prepared(run=ALONE, **more):
    return training.prepared(run, **more)


def saved_at(folder, *iterations, **options):
    """Saves after these iterations of a first epoch."""
    model, optimizer, loader = prepared()
    with loader:
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration in iterations:
                evenstep.checkpoint.save(folder, model, optimizer, loader, **options)


def restored_from(folder):
    """The name of what was restored, and the iterations of the epoch that are done there."""
    model, optimizer, loader = prepared()
    with loader:
        found = evenstep.checkpoint.restore(folder, model, optimizer, loader)
        return None if found is None else (found.name, loader.state_dict()["iteration"])


def test_there_is_nothing_to_restore_at_the_first_start(tmp_path):
    assert restored_from(tmp_path / "none") is None
    tmp_path.joinpath("notes.txt").write_text("mine")
    assert restored_from(tmp_path) is None


def test_the_newest_are_kept(tmp_path):
    saved_at(tmp_path, 1, 2, 3, 4, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-00000{number}" for number in (2, 3, 4)]
    assert restored_from(tmp_path) == ("checkpoint-000004", 4)


def test_the_last_one_with_finite_weights_is_kept_whatever_keep_says(tmp_path, recwarn):
    model, optimizer, loader = prepared()
    with loader, torch.no_grad():
        for _ in range(2):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader, keep=1)
        next(model.parameters())[0, 0] = float("nan")
        for _ in range(3):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000005"]
    assert [str(each.message) for each in recwarn] == [
        "the weights of checkpoint-000003 hold a NaN or an infinity: checkpoint-000002, the last with finite ones, is"
        " kept; to go on from it, move those after it to another folder"
    ]
    with pytest.warns(UserWarning, match="the weights of checkpoint-000005 hold a NaN or an infinity: checkpoint-00"):
        assert restored_from(tmp_path) == ("checkpoint-000005", 0)
    (tmp_path / "checkpoint-000005").rename(tmp_path / "aside")
    assert restored_from(tmp_path) == ("checkpoint-000002", 0)
    saved_at(tmp_path, 1, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside", "checkpoint-000003"]


def test_a_half_written_one_is_not_seen_and_makes_room(tmp_path):
    saved_at(tmp_path, 2)
    half = tmp_path / ".partial-checkpoint-000002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert restored_from(tmp_path) == ("checkpoint-000001", 2)
    saved_at(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


def test_a_run_that_meets_another_ones_checkpoints_leaves_them_alone(tmp_path):
    first, second = prepared(), prepared()
    for parts in (first, second):
        assert evenstep.checkpoint.restore(tmp_path, *parts) is None
    evenstep.checkpoint.save(tmp_path, *first)
    with pytest.raises(evenstep.CheckpointError, match=r"another run saves into .* too, since checkpoint-000001"):
        evenstep.checkpoint.save(tmp_path, *second)
    evenstep.checkpoint.save(tmp_path, *first)
    writing = CheckpointFolder(tmp_path)
    writing.begin()
    with pytest.raises(evenstep.CheckpointError, match=r"another run saves into .* too, since \.partial-"):
        evenstep.checkpoint.save(tmp_path, *first)
    writing.abandon()
    assert evenstep.checkpoint.save(tmp_path, *first).name == "checkpoint-000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000003"]
    for parts in (first, second):
        parts[2].close()


def test_a_full_disk_costs_nothing_but_the_checkpoint(tmp_path):
    model, optimizer, loader = prepared()
    with loader:
        before = evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
        with small_files_alone(), pytest.raises(evenstep.CheckpointError, match="see to it that the folder has room"):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
        assert [path.name for path in tmp_path.iterdir()] == [before.name]
        evenstep.checkpoint.save(tmp_path, model, optimizer, loader)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    model, optimizer, loader = prepared()
    with loader, checkpoints.HeldBack(".metadata.tmp") as writer:
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration == 2:
                weights = training.weights(model)
                first = evenstep.checkpoint.save(tmp_path, model, optimizer, loader, asynchronous=True)
                writer.reached.wait()
            if loader.iteration == 4:
                assert [path.name for path in tmp_path.iterdir()] == [".partial-checkpoint-000001"]
                writer.go.set()
        second = evenstep.checkpoint.save(tmp_path, model, optimizer, loader, asynchronous=True)
        assert first.exists()
    assert second.exists()
    second.rename(tmp_path / "aside")
    model, optimizer, loader = prepared()
    with loader:
        assert evenstep.checkpoint.restore(tmp_path, model, optimizer, loader) == first
        assert training.weights(model) == weights
        assert len(list(loader)) == 4


def lose_what_is_written(folder, model, optimizer, loader):
    """Save asynchronously, and remove the files that are being written."""
    with checkpoints.HeldBack(".metadata.tmp") as writer:
        saved = evenstep.checkpoint.save(folder, model, optimizer, loader, asynchronous=True)
        writer.reached.wait()
        shutil.rmtree(folder / f".partial-{saved.name}")
    return saved


LOST = "checkpoint-000002, which was written while training went on, failed"


def test_what_a_thread_could_not_write_is_raised_at_the_next_save(tmp_path, capfd):
    model, optimizer, loader = prepared()
    with loader:
        evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
        lost = lose_what_is_written(tmp_path, model, optimizer, loader)
        with pytest.raises(evenstep.CheckpointError, match=f"^{LOST}"):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
        assert evenstep.checkpoint.save(tmp_path, model, optimizer, loader) == lost
    assert capfd.readouterr().err.count(f"evenstep: {LOST}") == 1


def test_what_a_thread_could_not_write_is_raised_at_the_end(tmp_path):
    model, optimizer, loader = prepared()
    evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
    lose_what_is_written(tmp_path, model, optimizer, loader)
    with pytest.raises(evenstep.CheckpointError, match=f"^{LOST}"):
        loader.close()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    model, optimizer, loader = prepared()
    with pytest.raises(KeyError, match="mine"), loader:
        fail_after_losing_what_is_written(tmp_path, model, optimizer, loader)


def fail_after_losing_what_is_written(folder, *parts):
    evenstep.checkpoint.restore(folder, *parts)
    lose_what_is_written(folder, *parts)
    raise KeyError("mine")


def test_a_full_disk_is_told_of_at_the_end(tmp_path):
    model, optimizer, loader = prepared()
    with (
        small_files_alone(),
        pytest.raises(evenstep.CheckpointError, match="see to it that the folder has room"),
        loader,
    ):
        evenstep.checkpoint.save(tmp_path, model, optimizer, loader, asynchronous=True)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def small_files_alone():
    """No file can have more than 100 bytes; the error that writes then meet is an OSError, as that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_steps_that_are_not_seen_are_not_lost_in_silence(tmp_path):
    model, optimizer, loader = prepared()
    another = torch.optim.SGD(model.parameters(), lr=0.1)
    with loader:
        for inputs, targets in loader:
            training.step(model, another, inputs, targets)
            if loader.iteration == 2:
                break
        with pytest.warns(UserWarning, match="no step of the optimizer that prepare was given was seen in 2"):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def put_socket(path):
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


def put_folder(path):
    path.unlink()
    path.mkdir()


FILES = ("manifest.json", ".metadata", "__0_0.distcp")


@pytest.mark.parametrize(
    ("file", "damage"), list(product(FILES, (flip, cut, remove, put_pipe, put_socket, put_folder)))
)
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, file, damage):
    saved_at(tmp_path, 2, 4)
    damage(tmp_path / "checkpoint-000002" / file)
    with pytest.warns(UserWarning, match=r"checkpoint-000002 is damaged \(its .*\) and left out"):
        assert restored_from(tmp_path) == ("checkpoint-000001", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', '{"files": {}}', '{"files": [1]}', "\0" * 64, ""])
def test_a_manifest_of_any_form_is_damaged(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DamagedError, match=r"its manifest.json is none"):
        manifest_of(tmp_path)


@pytest.mark.parametrize("do", [evenstep.checkpoint.save, evenstep.checkpoint.restore])
def test_a_folder_that_is_a_file_is_said(tmp_path, do):
    model, optimizer, loader = prepared()
    (tmp_path / "file").touch()
    with loader, pytest.raises(evenstep.CheckpointError, match=r"the checkpoint failed \(.*(File exists|Not a dir)"):
        do(tmp_path / "file", model, optimizer, loader)


@pytest.mark.parametrize("do", [evenstep.checkpoint.save, evenstep.checkpoint.restore])
def test_a_failure_keeps_nothing_of_the_script(tmp_path, do):
    # What a cycle keeps ends when the collector comes, and in a killed process never.
    def script():
        model, optimizer, loader = prepared()
        kept = Odd()
        with loader, suppress(evenstep.CheckpointError):
            do(tmp_path / "file", model, optimizer, loader)
        return weakref.ref(kept)

    (tmp_path / "file").touch()
    gc.disable()
    try:
        assert script()() is None
    finally:
        gc.enable()


def test_a_run_that_left_out_a_damaged_one_saves_after_it(tmp_path):
    saved_at(tmp_path, 1, 2)
    flip(tmp_path / "checkpoint-000002" / "__0_0.distcp")
    model, optimizer, loader = prepared()
    with loader:
        with pytest.warns(UserWarning, match="is damaged"):
            evenstep.checkpoint.restore(tmp_path, model, optimizer, loader)
        saved = evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
    assert saved.name == "checkpoint-000003"
    assert restored_from(tmp_path) == ("checkpoint-000003", 1)


def test_where_none_is_whole_training_does_not_begin_anew_however_often_it_starts(tmp_path):
    saved_at(tmp_path, 2)
    flip(tmp_path / "checkpoint-000001" / "__0_0.distcp")
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="is damaged"),
            pytest.raises(
                evenstep.CheckpointError, match=r"no checkpoint in .* is whole, and checkpoint-000001 is damaged"
            ),
        ):
            restored_from(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_an_error_that_passes_is_no_damage(tmp_path):
    tries, file = [], tmp_path / "file"
    file.touch()

    def read(path, *, failures):
        tries.append(path)
        if len(tries) <= failures:
            raise PermissionError(13, "Permission denied")
        return "read"

    assert read_of(file, partial(read, failures=2), pause=0.0) == "read"
    assert tries == [file] * 3
    with pytest.raises(PermissionError):
        read_of(file, partial(read, failures=99), pause=0.0)
    with pytest.raises(DamagedError, match="its other cannot be read"):
        read_of(tmp_path / "other", Path.read_bytes, pause=0.0)


def test_the_format_of_another_version_is_named(tmp_path):
    saved_at(tmp_path, 2)
    manifest = tmp_path / "checkpoint-000001" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1, "evenstep": "0.1"}))
    with pytest.raises(evenstep.CheckpointError, match="checkpoint-000001 has format 1, written by evenstep"):
        restored_from(tmp_path)


def test_the_manifest_says_what_it_is(tmp_path):
    saved_at(tmp_path, 4)
    manifest = json.loads((tmp_path / "checkpoint-000001" / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["iteration"], manifest["workers"]) == (0, 4, 1)
    assert manifest["evenstep"] == evenstep.__version__


def test_what_a_script_does_between_loops_is_done_once(tmp_path):
    saved_at(tmp_path, 6)  # The last one of its epoch, in the loop.
    model, optimizer, loader = prepared()
    with loader:
        evenstep.checkpoint.restore(tmp_path, model, optimizer, loader)
        assert (loader.epoch, list(loader), loader.epoch) == (0, [], 1)
        evenstep.checkpoint.save(tmp_path, model, optimizer, loader)  # Between loops.
        evenstep.checkpoint.restore(tmp_path, model, optimizer, loader)
        assert (loader.epoch, len(list(loader)), loader.epoch) == (1, 6, 1)  # A peek, since nothing was computed.


def test_another_scheme_goes_on_with_the_samples(tmp_path):
    saved_at(tmp_path, 4)
    model, optimizer, loader = prepared(Run(samples=60, epochs=2, global_batch_size=10, scheme="bsp"))
    with loader:
        evenstep.checkpoint.restore(tmp_path, model, optimizer, loader)
        assert len(list(loader)) == 2


def other_model():
    return torch.nn.Sequential(torch.nn.Linear(training.FEATURES, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(training.FEATURES, 1).double(), r"it lacks 'bias'"),
        (other_model(), r"'0.weight' is \[8, 6\] there and \[9, 6\] here"),
    ],
)
def test_another_model_is_refused(tmp_path, model, message):
    saved_at(tmp_path, 4)
    model, optimizer, loader = prepared(model=model)
    with loader, pytest.raises(evenstep.ConfigError, match=message):
        evenstep.checkpoint.restore(tmp_path, model, optimizer, loader)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_another_kind_of_optimizer_is_refused(tmp_path, kind):
    saved_at(tmp_path, 4)
    model, _, loader = prepared()
    with loader, pytest.raises(evenstep.ConfigError, match=f"another kind of optimizer than {kind.__name__}"):
        evenstep.checkpoint.restore(tmp_path, model, kind(model.parameters()), loader)


def test_other_extras_are_refused(tmp_path):
    saved_at(tmp_path, 4)
    model, optimizer, loader = prepared()
    with loader, pytest.raises(evenstep.ConfigError, match=r"has the extras \[\], and \['scaler'\]"):
        evenstep.checkpoint.restore(tmp_path, model, optimizer, loader, extras={"scaler": torch.nn.Linear(1, 1)})


class Odd:
    """Its state is more than plain values."""

    def state_dict(self):
        return {"self": self}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep must be a whole number from 1 to 2147483647, not 0"),
        ({"extras": [1]}, r"extras must be a dict of names and objects, not \[1\]"),
        ({"extras": {"odd": Odd()}}, "the state of the extra 'odd' holds more than tensors and plain values"),
        ({"extras": {"number": 3}}, "the extra 'number' has no state_dict"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, options, message):
    saved_at(tmp_path, 1)
    with pytest.raises(evenstep.ConfigError, match=message):
        saved_at(tmp_path, 2, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


@pytest.mark.parametrize("do", [evenstep.checkpoint.save, evenstep.checkpoint.restore])
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0mol", "folder must be the path of a folder, not None: give folder, model, optimizer, loader, in this order"),
        ("molf", "folder must be the path of a folder, not PreparedModel"),
        ("foml", "model must be what prepare returned, or a tuple of them, not SGD: give folder, model"),
        ("fmlo", "optimizer must be what prepare returned, or a tuple of them, not PreparedLoader"),
        ("fmof", "loader must be what prepare returned, or a tuple of them, not '"),
        ("fmo-", "loader must be what prepare returned, or a tuple of them, not an empty tuple"),
    ],
)
def test_other_arguments_than_a_folder_and_what_prepare_returned_are_refused(tmp_path, do, order, message):
    model, optimizer, loader = prepared()
    parts = {"f": str(tmp_path), "m": model, "o": optimizer, "l": loader, "0": None, "-": ()}
    with loader, pytest.raises(evenstep.ConfigError, match=f"^{message}"):
        do(*(parts[each] for each in order))


def test_between_micro_batches_nothing_is_saved(tmp_path):
    model, optimizer, loader = prepared(Run(samples=60, epochs=1, global_batch_size=10, scheme="bsp:micro_batch=5"))
    with loader:
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if not loader.synchronises:
                with pytest.raises(evenstep.ConfigError, match="between two micro-batches"):
                    evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
            else:
                evenstep.checkpoint.save(tmp_path, model, optimizer, loader)
                break
        else:
            raise AssertionError("the loop ended")
    assert restored_from(tmp_path) == ("checkpoint-000001", 1)


@pytest.mark.multiprocess
def test_schemes_on_servers_have_snapshots_of_their_own(tmp_path):
    said = single_process(checkpoints.save_under_servers, tmp_path)
    assert said.startswith(
        "under the scheme 'asp' weights and optimizer state are on servers, which write their own snapshots"
    )
    assert "continue with --resume" in said


def test_gradients_of_the_epoch_before_are_not_lost_in_silence(tmp_path):
    model, optimizer, loader = prepared()
    with loader:
        for inputs, _ in loader:
            model(inputs).sum().backward()
            if loader.iteration == 1:
                optimizer.step()
        for inputs, _ in loader:
            model(inputs).sum().backward()
            break
        with pytest.warns(UserWarning, match="gradients of the epoch before wait for the optimizer's step"):
            evenstep.checkpoint.save(tmp_path, model, optimizer, loader)


def test_a_checkpoint_is_quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_at(tmp_path, 1)
        restored_from(tmp_path)

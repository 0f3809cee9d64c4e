"""Settings come from arguments, then from the environment, then from defaults; a wrong one is named by where it was."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import parse_cluster
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.telemetry import read_events
from evenstep.torch.request import RunRequest

CLUSTER = '[devices.old]\nper_sample = "1 ms"\n[[workers]]\ndevice = "old"\ncount = {}\n'


def prepared(written, **options):
    """The `run` event that a run of one worker writes into this folder."""
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
    evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options)
    return [event for event in read_events(written) if event.kind == "run"][-1]


def test_the_scheme_by_argument_environment_and_default(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENSTEP_RUN_DIR", str(tmp_path))
    assert prepared(tmp_path).scheme == "lb-bsp"
    monkeypatch.setenv("EVENSTEP_SCHEME", "lb-bsp:multiple=2")
    assert prepared(tmp_path).scheme == "lb-bsp:multiple=2"
    assert prepared(tmp_path, scheme="bsp").scheme == "bsp"
    assert prepared(tmp_path, scheme=evenstep.schemes.lb_bsp(multiple=4)).scheme == "lb-bsp:multiple=4"
    assert prepared(tmp_path, batch_sizes=[3]).scheme == "static:3"
    monkeypatch.setenv("EVENSTEP_SCHEME", "")
    assert prepared(tmp_path).scheme == "lb-bsp"


def test_batch_sizes_by_argument_environment_and_not_with_a_scheme_beside_them(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENSTEP_BATCH_SIZES", "rank:0=3")
    assert prepared(tmp_path, run_dir=tmp_path).scheme == "static:3"
    assert prepared(tmp_path, run_dir=tmp_path, batch_sizes=[2]).scheme == "static:2"
    assert prepared(tmp_path, run_dir=tmp_path, scheme="static:5").scheme == "static:5"
    monkeypatch.setenv("EVENSTEP_SCHEME", "dbs")
    assert prepared(tmp_path, run_dir=tmp_path, scheme="bsp").scheme == "bsp"
    with pytest.raises(evenstep.ConfigError, match=r"EVENSTEP_BATCH_SIZES fixes the sizes and EVENSTEP_SCHEME 'dbs'"):
        prepared(tmp_path)


def test_the_global_batch_is_the_sum_of_fixed_sizes_before_the_workers_meet_too(monkeypatch):
    monkeypatch.setenv("EVENSTEP_BATCH_SIZES", "3")
    loader = evenstep.Session().loader(DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4))
    assert (loader.global_batch_size, len(loader)) == (3, 3)


def test_the_run_directory_and_the_emulated_cluster(tmp_path, monkeypatch):
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENSTEP_RUN_DIR", "environment")
    assert not prepared(tmp_path / "environment").emulated
    monkeypatch.setenv("EVENSTEP_EMULATE", "cluster.toml")
    assert prepared(tmp_path / "argument", run_dir="argument").emulated
    assert len(list(read_events(tmp_path / "environment"))) > 0
    monkeypatch.setenv("EVENSTEP_EMULATE", "nowhere.toml")
    assert prepared(tmp_path / "environment", emulate=parse_cluster(CLUSTER.format(1))).emulated


@pytest.mark.parametrize(
    ("given", "variable", "seconds"), [(5.0, "7", 5.0), (None, "7", 7.0), (None, "", 300.0), (5.0, "soon", 5.0)]
)
def test_the_timeout(given, variable, seconds):
    launched = LaunchSettings.from_environment({"EVENSTEP_TIMEOUT": variable})
    assert RunRequest.of(launched, timeout=given).timeout == seconds


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("EVENSTEP_SCHEME", "lbbsp", "EVENSTEP_SCHEME: there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ("EVENSTEP_BATCH_SIZES", "x", "EVENSTEP_BATCH_SIZES: the batch size of worker 0 must be a whole number from 1"),
        ("EVENSTEP_SLOW", "0=2x, 1=4x", "EVENSTEP_SLOW 1=4x names worker 1 but the last one is 0"),
        ("EVENSTEP_SLOW", "0=half", "EVENSTEP_SLOW needs a rank and how much slower, such as 3=4x"),
        ("EVENSTEP_EMULATE", "nowhere.toml", "EVENSTEP_EMULATE: the cluster file "),
        ("EVENSTEP_RUN_DIR", "/dev/null/run", "EVENSTEP_RUN_DIR: the run directory /dev/null/run cannot be written"),
        ("EVENSTEP_TIMEOUT", "-1", "EVENSTEP_TIMEOUT must be a positive number of seconds, at most 1e+09, not '-1'"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(evenstep.ConfigError) as raised:
        prepared(tmp_path)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "nearest"), [("EVENSTEP_SHEME", "EVENSTEP_SCHEME"), ("EVENSTEP_SECRETS", "EVENSTEP_SECRET")]
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_one_in_one_process_of_a_run(name, nearest):
    with pytest.warns(UserWarning, match="is unknown") as given:
        LaunchSettings.from_environment({name: "1", "EVENSTEP_SCHEME": "bsp", "EVENSTEP_RESTART": "0", "EVENSTEPS": ""})
    sentence = f"the environment variable {name} is unknown and has no effect: did you mean '{nearest}'?"
    assert [str(each.message) for each in given] == [sentence]
    LaunchSettings.from_environment({name: "1", "RANK": "1"})
    LaunchSettings.from_environment({name: "1", **LaunchSettings().to_environment()})


def test_the_variables_are_what_the_launcher_sets():
    settings = LaunchSettings(
        scheme="asp", slow=("0=2x", "1=+0.5 s"), run_dir="/run", timeout="9", heartbeat_seconds=5.0
    )
    variables = settings.to_environment()
    assert variables["EVENSTEP_SLOW"] == "0=2x,1=+0.5 s"
    assert "EVENSTEP_EMULATE" not in variables
    assert LaunchSettings.from_environment(variables) == settings

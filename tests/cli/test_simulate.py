"""`evenstep simulate` on the command line."""

import json

import pytest

from evenstep.cli.main import main
from evenstep.cli.simulated import split_schemes
from evenstep.report.summary import summarise
from evenstep.schemes import parse_scheme

CLUSTER = """
[devices.old]
per_sample = "4 ms"
[devices.new]
per_sample = "1 ms"
[[workers]]
device = "new"
count = 3
[[workers]]
device = "old"
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def values(capsys, *arguments):
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_has_a_row_for_each_scheme_and_its_speed_up_over_the_first(cluster, capsys):
    assert main(["simulate", cluster, "--iterations", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.rstrip().endswith("x")}
    assert list(rows) == ["bsp", "lb-bsp", "dbs", "ssp", "dssp", "asp"]
    assert rows["bsp"][-1] == "1.00x"
    assert rows["bsp"][1:4] == ["1,000", "31%", "56%"]
    assert float(rows["asp"][-1].rstrip("x")) > 3.0


@pytest.mark.parametrize("columns", ["40", "80"])
def test_schemes_have_their_names_however_narrow_the_terminal(cluster, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["simulate", cluster, "--iterations", "5", "--schemes", "dssp:bounded=false", "asp:load=lb-bsp"]) == 0
    assert {"dssp:bounded=false", "asp:load=lb-bsp"} <= set(capsys.readouterr().out.split())


def test_json_has_the_figures_of_each_run_and_worker(cluster, capsys):
    told = values(capsys, cluster, "--schemes", "bsp", "asp", "--iterations", "50")
    assert told["simulated"] is True
    bsp, asp = told["runs"]
    assert (bsp["scheme"], asp["scheme"]) == ("bsp", "asp")
    assert bsp["seconds"] == pytest.approx(50 * 0.128)
    assert bsp["samples"] == asp["samples"] == 6_400
    assert sum(each["samples"] for each in asp["by_worker"]) >= 6_400
    assert bsp["waiting_share"] == pytest.approx(9 / 16)


def test_rows_are_named_by_the_values_that_were_given_whichever_is_the_default(cluster, tmp_path, capsys):
    folder = tmp_path / "events"
    told = values(
        capsys,
        *(cluster, "--schemes", "bsp", *(f"ssp:bound={bound}" for bound in (2, 3, 4)), "dssp:upper=15,dssp:upper=20"),
        *("--iterations", "5", "--run-dir", str(folder)),
    )
    assert [run["scheme"] for run in told["runs"]] == [
        "bsp", "ssp:bound=2", "ssp:bound=3", "ssp:bound=4", "dssp:upper=15", "dssp:upper=20",
    ]  # fmt: skip
    assert sorted(each.name for each in folder.glob("ssp*")) == ["ssp-bound-2", "ssp-bound-3", "ssp-bound-4"]
    assert {parse_scheme(run["scheme"]).name for run in told["runs"]} >= {"ssp", "dssp"}


def test_the_cluster_file_may_stand_behind_the_schemes(cluster, capsys):
    for order in (["--schemes", "bsp", "asp", cluster, "--iterations", "5"], ["--schemes", "bsp", "asp", cluster]):
        assert [run["scheme"] for run in values(capsys, *order)["runs"]] == ["bsp", "asp"]
    assert len(values(capsys, "--iterations", "5", "--schemes", "bsp,asp", cluster)["runs"]) == 2


def test_batches_epochs_and_communication_can_be_told(cluster, capsys):
    told = values(
        capsys,
        *(cluster, "--schemes", "bsp", "--global-batch-size", "40", "--iterations", "7"),
        *("--samples-per-epoch", "100", "--exchange", "5 ms"),
    )
    (run,) = told["runs"]
    # Epochs of 40, 40 and 20: two of them and one slice more.
    assert run["samples"] == 240
    assert run["seconds"] == pytest.approx(5 * 0.040 + 2 * 0.020 + 7 * 0.005)


def test_events_go_into_a_folder_for_each_scheme(cluster, tmp_path, capsys):
    folder = tmp_path / "events"
    arguments = ["simulate", cluster, "--schemes", "lb-bsp", "ssp:bound=2", "--iterations", "30"]
    assert main([*arguments, "--run-dir", str(folder)]) == 0
    assert sorted(each.name for each in folder.iterdir()) == ["lb-bsp", "ssp-bound-2"]
    assert summarise(folder / "lb-bsp").iterations == 30
    assert summarise(folder / "ssp-bound-2").served.samples_committed == 3_840
    capsys.readouterr()
    assert main([*arguments, "--run-dir", str(folder)]) == 2
    assert "holds the events of a run already" in capsys.readouterr().err


def test_schemes_that_differ_in_signs_alone_have_a_folder_each(cluster, tmp_path, capsys):
    schemes = ["grouped:groups=0-1/2-3", "grouped:groups=0/1-2/3", "grouped:groups=0-1/2/3"]
    arguments = [cluster, "--schemes", *schemes, "--iterations", "5", "--run-dir", str(tmp_path / "events")]
    told = values(capsys, *arguments)
    folders = sorted((tmp_path / "events").iterdir())
    assert [each.name for each in folders] == [f"grouped-groups-0-1-2-3{more}" for more in ("", "-2", "-3")]
    for folder, run in zip(folders, told["runs"], strict=True):
        assert summarise(folder).served.samples_committed == run["samples"]


def test_where_workers_come_and_go_the_schemes_are_those_with_servers(tmp_path, capsys):
    path = tmp_path / "spot.toml"
    path.write_text(CLUSTER.replace("count = 3", 'count = 3\nspot = "s"') + '[spots.s]\nstays = "3 s"\naway = "1 s"')
    told = values(capsys, str(path), "--iterations", "50")
    assert told["runs"][0]["scheme"] == "bsp:engine=server"
    assert len(told["runs"]) == 5


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("", "the following arguments are required: CLUSTER.toml"),
        ("nowhere.toml", "nowhere.toml cannot be read"),
        ("HERE --schemes lbbsp", "there is no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ("HERE --schemes ,", "--schemes has no scheme in it"),
        ("HERE --iterations 0", "iterations must be a whole number of at least 1, not 0"),
        ("HERE --iterations many", "argument --iterations: invalid int value: 'many'"),
        ("HERE --batch-size 0", "global_batch_size must be a whole number of at least 1"),
        ("HERE --gradients big", "--gradients must be a memory size"),
        ("HERE --exchange long", "--exchange must be a duration"),
        ("HERE --all-reduce star", "use ring or tree"),
        ("HERE --itertions 5", "did you mean '--iterations'?"),
    ],
)
def test_mistakes_are_one_sentence(arguments, fragment, cluster, capsys):
    assert main(["simulate", *arguments.replace("HERE", cluster).split()]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("evenstep: ")
    assert len(error.splitlines()) == 1
    assert fragment in error


def test_a_scheme_that_fails_on_the_way_is_named(tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(CLUSTER.replace('"4 ms"', '"4 ms"\nmemory = "20 MB"\nmemory_per_sample = "1 MB"'))
    assert main(["simulate", str(path), "--schemes", "asp", "bsp", "--iterations", "3"]) == 2
    assert "evenstep: asp: worker 3 was given 32 samples but its device holds at most 20" in capsys.readouterr().err


def test_commas_between_schemes_are_told_from_those_within():
    assert split_schemes("bsp, ssp:bound=2,servers=2,asp") == ["bsp", "ssp:bound=2,servers=2", "asp"]
    assert split_schemes("asp:load=lb-bsp:predictor=ema;minimum=4,servers=2,bsp") == [
        "asp:load=lb-bsp:predictor=ema;minimum=4,servers=2",
        "bsp",
    ]


def test_the_file_may_say_how_large_the_gradients_are_and_the_option_goes_before(tmp_path, capsys):
    path = tmp_path / "linked.toml"
    linked = CLUSTER + 'link = "lan"\n[links.lan]\nbandwidth = "100 Mbit/s"\n'
    path.write_text('gradients = "10 MB"\n' + linked)
    options = (str(path), "--schemes", "bsp", "--iterations", "10")
    (of_file,) = values(capsys, *options)["runs"]
    (same,) = values(capsys, *options, "--gradients", "10 MB")["runs"]
    (less,) = values(capsys, *options, "--gradients", "1 MB")["runs"]
    assert of_file["seconds"] == same["seconds"] > less["seconds"]
    path.write_text('gradients = "much"\n' + linked)
    assert main(["simulate", str(path)]) == 2
    assert "gradients must be a memory size" in capsys.readouterr().err


def test_the_file_may_say_what_samples_cost_and_the_option_goes_before(cluster, tmp_path, capsys):
    path = tmp_path / "texts.toml"
    path.write_text('costs = "lognormal 1.0"\n' + CLUSTER)
    options = ("--schemes", "lb-bsp", "asp", "--iterations", "30")
    of_file, same, other, none = (
        values(capsys, *arguments, *options)
        for arguments in (
            (str(path),),
            (cluster, "--costs", "lognormal 1.0"),
            (str(path), "--costs", "uniform 1 9"),
            (cluster,),
        )
    )
    assert of_file["runs"] == same["runs"] != other["runs"] != none["runs"]
    assert [each["costs"] for each in (of_file, same, other, none)] == [
        "lognormal 1",
        "lognormal 1.0",
        "uniform 1 9",
        None,
    ]
    assert main(["simulate", str(path), *options]) == 0
    assert "12800 samples an epoch of costs lognormal 1; simulated." in capsys.readouterr().out
    blind = values(capsys, str(path), "--by-count", *options)
    assert blind["costs"] == "lognormal 1, divided by count"
    assert blind["runs"][0]["seconds"] > 1.1 * of_file["runs"][0]["seconds"]


def test_costs_are_read_from_a_file(cluster, tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("1.5 2\n40\n3\n")
    run = values(capsys, cluster, "--schemes", "asp", "--iterations", "20", "--costs", str(tmp_path / "lengths.txt"))
    assert run["costs"] == str(tmp_path / "lengths.txt")


def test_what_samples_cost_is_in_the_events_and_the_report(cluster, tmp_path, capsys):
    folder = tmp_path / "events"
    assert main(["simulate", cluster, "--costs", "uniform 1 9", "--run-dir", str(folder), "--schemes", "asp"]) == 0
    capsys.readouterr()
    assert main(["report", str(folder / "asp"), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert sum(each["cost"] for each in report["workers"]) == pytest.approx(500 * 128, rel=0.01)


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("nowhere.txt", None, "cannot be read (No such file or directory): give a file with a number for each sample"),
        ("normal 1", None, 'or "lognormal SIGMA" or "uniform LEAST MOST"'),
        ("empty.txt", b"", "does not hold numbers between blanks, one for each sample"),
        ("words.txt", b"1 2 three", "does not hold numbers between blanks"),
        ("negative.txt", b"1 -2", "the cost of sample 1 is -2.0"),
        ("nan.txt", b"nan 1", "the cost of sample 0 is nan"),
        ("text.txt", b"\xff\xfe", "does not hold numbers between blanks"),
    ],
)
def test_costs_that_are_none_are_refused_in_one_sentence(cluster, tmp_path, capsys, name, content, fragment):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    given = name if name == "normal 1" else str(path)
    assert main(["simulate", cluster, "--costs", given]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("evenstep: --costs: ")
    assert len(error.splitlines()) == 1
    assert fragment in error


def test_a_distribution_that_is_none_is_refused_in_one_sentence(cluster, capsys):
    assert main(["simulate", cluster, "--costs", "lognormal -1"]) == 2
    assert "--costs 'lognormal -1': sigma must be a finite number greater than 0" in capsys.readouterr().err

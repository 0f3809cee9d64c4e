"""Advice on simulated runs, whose best scheme and gains are known."""

import json
import re
from dataclasses import replace

import pytest

from evenstep.advice import accounted_machines, advise, balancing, described_machines, measured_machines
from evenstep.advice.advise import _simulated, is_exact
from evenstep.cli.main import main
from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.report.conclusions import account_of, conclusions_of
from evenstep.report.recorded import read_run
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

SLOW = """
[devices.new]
fixed = "20 ms"
per_sample = "2 ms"
[devices.old]
fixed = "40 ms"
per_sample = "4 ms"
[disturbances.noise]
kind = "jitter"
spread = "3 %"
[[workers]]
device = "new"
disturb = ["noise"]
count = 3
[[workers]]
device = "old"
disturb = ["noise"]
"""
EQUAL = """
[devices.new]
per_sample = "2 ms"
[[workers]]
device = "new"
count = 4
"""
JITTER = """
[devices.new]
per_sample = "2 ms"
[disturbances.noise]
kind = "jitter"
spread = "60 %"
[[workers]]
device = "new"
disturb = ["noise"]
count = 8
"""
EPISODES = """
[devices.new]
per_sample = "2 ms"
[disturbances.neighbour]
kind = "episodic"
factor = 3
period = 200
shortest = 60
longest = 100
[[workers]]
device = "new"
disturb = ["neighbour"]
count = 4
"""


def simulated(cluster, scheme, **about):
    about = {"global_batch_size": 128, "iterations": 400, **about}
    return simulate(Scenario(cluster=parse_cluster(cluster), scheme=parse_scheme(scheme), **about))


@pytest.fixture
def run_of(tmp_path):
    """Simulate a run and return its run directory."""

    def run(cluster, scheme, *options):
        file = tmp_path / "cluster.toml"
        file.write_text(cluster)
        into = ["--schemes", scheme, "--run-dir", str(tmp_path / "runs"), "--json"]
        assert main(["simulate", str(file), *into, *options]) == 0
        (found,) = (tmp_path / "runs").iterdir()
        return found

    return run


@pytest.mark.parametrize("scheme", ["lb-bsp", "ssp", "asp:load=lb-bsp"])
def test_a_run_under_any_scheme_gives_the_gain_of_the_best_exact_one(run_of, scheme):
    run = run_of(SLOW, scheme, "--iterations", "100", "--exchange", "5 ms")
    advice = advise(measured_machines(read_run(run)))
    truth = [simulated(SLOW, each, exchange_seconds=0.005).samples_per_second for each in ("bsp", "lb-bsp")]
    assert advice.pick.scheme == "lb-bsp"
    assert advice.speed_up(advice.pick) == pytest.approx(truth[1] / truth[0], rel=0.05)
    assert re.fullmatch(r"Worker 3 is a steady 2(\.1)?x slower than the fastest, in equal batches\.", advice.why[0])


def test_a_run_with_equal_sizes_does_not_show_the_fixed_part_so_time_is_taken_to_follow_sizes(run_of):
    machines = measured_machines(read_run(run_of(SLOW, "bsp", "--iterations", "60")))
    assert [each.device.curve.fixed_seconds for each in machines.cluster.workers] == [0.0] * 4
    truth = simulated(SLOW, "lb-bsp").samples_per_second / simulated(SLOW, "bsp").samples_per_second
    advice = advise(machines)
    assert advice.speed_up(advice.pick) == pytest.approx(truth, rel=0.1)


DIFFERENT = SLOW.replace('fixed = "40 ms"', 'fixed = "100 ms"')


def test_a_worker_has_the_fixed_part_that_its_own_sizes_show(run_of):
    machines = measured_machines(read_run(run_of(DIFFERENT, "lb-bsp", "--iterations", "60")))
    curve = machines.cluster.workers[3].device.curve
    assert curve.fixed_seconds / curve.seconds(32) == pytest.approx(100 / 228, abs=0.05)


def test_the_simulation_of_the_runs_own_scheme_is_compared_with_the_run(run_of):
    advice = advise(measured_machines(read_run(run_of(SLOW, "lb-bsp", "--iterations", "100"))))
    assert advice.simulated == pytest.approx(advice.measured, rel=0.05)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [(SLOW, r"Use lb-bsp: up to \+\d+ % over plain DDP\. Next: it\."), (EQUAL, "lb-bsp would gain less than 2%.")],
)
def test_a_run_with_equal_sizes_is_told_at_its_end_what_the_plan_tells_of_its_record(run_of, cluster, said):
    run = read_run(run_of(cluster, "bsp", "--iterations", "100", "--exchange", "5 ms"))
    verdict = conclusions_of(run).verdict
    ended = balancing(verdict, lambda: accounted_machines(account_of(run)), "it")
    assert re.fullmatch(said, ended)
    assert ended == balancing(verdict, lambda: measured_machines(run), "it")
    assert balancing(replace(verdict, sizes_may_help=False), lambda: measured_machines(run), "it") == ""


def test_equal_workers_have_nothing_to_gain():
    advice = advise(described_machines(parse_cluster(EQUAL), 128))
    assert (advice.pick.scheme, advice.stale) == ("bsp", None)
    assert advice.text == "Nothing is to be gained over plain DDP."
    assert advice.why == ("All workers are equally fast, and stay so.",)


def test_jitter_is_left_to_stale_schemes_which_are_not_the_pick():
    advice = advise(described_machines(parse_cluster(JITTER), 256))
    assert is_exact(advice.pick.scheme)
    assert advice.stale is not None
    assert advice.stale.mean_staleness > 0
    assert "compare the accuracy" in advice.text
    assert any("no sizes can follow" in each for each in advice.why)


def test_episodes_are_told_from_lasting_slowness():
    why = advise(described_machines(parse_cluster(EPISODES), 128)).why
    assert len(why) == 1
    assert why[0].startswith("Workers 0 1 2 3 are 3x slower for a while now and then")


def test_the_figures_of_a_cluster_file_are_those_of_the_simulator():
    advice = advise(described_machines(parse_cluster(SLOW), 128), schemes=["lb-bsp"])
    assert [each.scheme for each in advice.runs] == ["bsp", "lb-bsp"]
    for each in advice.runs:
        expected = simulated(SLOW, each.scheme, epoch_samples=100 * 128).samples_per_second
        assert each.samples_per_second == pytest.approx(expected, rel=1e-6)


def test_links_come_from_the_file_and_speeds_from_the_run(run_of):
    run = read_run(run_of(SLOW, "lb-bsp", "--iterations", "100"))
    linked = SLOW.replace('device = "old"\ndisturb', 'device = "old"\nlink = "slow"\ndisturb')
    linked += '[links.slow]\nbandwidth = "100 Mbit/s"\n'
    machines = measured_machines(run, parse_cluster(linked))
    with pytest.raises(ConfigError, match="the size of the gradients on them is unknown"):
        advise(machines)
    free, costly = (advise(machines, schemes=["lb-bsp"], message_bytes=each) for each in (0, 10_000_000))
    assert costly.pick.samples_per_second < 0.5 * free.pick.samples_per_second


def test_the_command_prints_the_advice_and_its_reason(run_of, capsys):
    run = run_of(SLOW, "lb-bsp", "--iterations", "100")
    capsys.readouterr()
    assert main(["plan", str(run), "--schemes", "lb-bsp,dbs"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Use lb-bsp: +")
    assert "Worker 3 is a steady 2x slower" in printed
    assert "After its start, the run trained" in printed
    assert main(["plan", str(run), "--schemes", "lb-bsp", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pick"] == "lb-bsp"
    assert told["schemes"][1]["speed_up"] > 1.1


@pytest.mark.parametrize(
    ("cluster", "iterations", "told"),
    [(SLOW, "12", "train a little longer"), (EQUAL.replace("count = 4", "count = 1"), "60", "waits for no other")],
)
def test_a_run_that_says_too_little_is_refused(run_of, cluster, iterations, told, capsys):
    run = run_of(cluster, "bsp", "--iterations", iterations)
    assert main(["plan", str(run)]) == 2
    assert told in capsys.readouterr().err


def test_arguments_that_do_not_go_together_are_refused(run_of, tmp_path, capsys):
    run = str(run_of(SLOW, "bsp", "--iterations", "60"))
    cluster = str(tmp_path / "cluster.toml")
    three = tmp_path / "three.toml"
    three.write_text(SLOW.replace("count = 3", "count = 2"))
    for arguments, told in [
        ([run, run], "one run directory, one cluster file, or one of each"),
        ([run, "--global-batch-size", "64"], "a run has its own"),
        ([cluster, "--global-batch-size", "3"], "at least 4"),
        ([run, str(three)], "4 workers and the cluster file 3"),
        ([str(tmp_path / "none")], "there is no folder"),
        ([run, "--schemes", "nosuch"], "nosuch"),
    ]:
        assert main(["plan", *arguments]) == 2
        assert told in capsys.readouterr().err


def test_a_variant_without_stale_gradients_is_exact_and_may_be_picked():
    machines = described_machines(parse_cluster(SLOW), 128)
    advice = advise(machines, schemes=["lb-bsp:change_cost=0", "bsp:engine=server"])
    assert all(is_exact(each.scheme) for each in advice.runs)
    assert advice.pick.scheme == "lb-bsp:change_cost=0"
    assert "versions old" not in advice.text


def test_nothing_is_said_of_exact_schemes_that_were_not_compared():
    advice = advise(described_machines(parse_cluster(SLOW), 128), schemes=["ssp", "local-sgd"])
    assert [each.scheme for each in advice.runs if is_exact(each.scheme)] == ["bsp"]
    assert advice.text == "No other exact scheme was compared with plain DDP."


@pytest.mark.parametrize("scheme", ["lb-bsp", "ssp"])
def test_a_run_without_the_files_of_all_workers_is_refused(scheme, run_of):
    folder = run_of(SLOW, scheme)
    (folder / "worker-2.jsonl").unlink()
    with pytest.raises(ConfigError, match="1 of the run's workers have no iterations"):
        measured_machines(read_run(folder))


def test_spot_workers_are_refused_with_what_to_do_instead():
    spot = '[spots.s]\nstays = "5 s"\naway = "2 s"\n' + EQUAL + 'spot = "s"\n'
    with pytest.raises(ConfigError, match="evenstep simulate instead"):
        advise(described_machines(parse_cluster(spot), 64))


def test_hundreds_of_workers_are_looked_at_over_fewer_iterations():
    machines = described_machines(parse_cluster(EQUAL.replace("count = 4", "count = 500")), 16_000)
    assert machines.seconds.shape == (500, 100)
    # Of these too there are several epochs, after which `dbs` changes sizes.
    fewer = described_machines(parse_cluster(SLOW.replace("count = 3", "count = 199")), 6400)
    assert fewer.seconds.shape == (200, 100)
    assert _simulated(fewer, "dbs", None).samples_per_second > 6400 / 0.168

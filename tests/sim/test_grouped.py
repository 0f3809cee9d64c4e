"""Groups in virtual time: the traces of what they are made of, and the closed form of what a straggler costs."""

import json

import pytest
from msgspec.structs import replace

from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry.reading import event_of
from evenstep.telemetry.recorder import line_of

WORKERS = 16
UNDISTURBED_SECONDS = 0.08
"""Of an iteration of `cluster(1.0)`."""


class Kept(list):
    def record(self, event):
        self.append(event_of(line_of(event)))

    def close(self):
        pass


def cluster(slowdown=1.0, slow=5, workers=WORKERS, more="", noise=0):
    slower = f'[disturbances.slow]\nkind = "constant"\nfactor = {slowdown}\n'
    slower += f'[disturbances.noise]\nkind = "jitter"\nspread = "{noise} %"\n'
    each = [
        f'[[workers]]\ndevice = "one"\ndisturb = {json.dumps(["noise", "slow"][: 1 + (worker == slow)])}\n'
        + more.format(worker // 4)
        for worker in range(workers)
    ]
    hosts = "".join(f"[hosts.h{number}]\n" for number in range(4)) if more else ""
    return parse_cluster('[devices.one]\nper_sample = "10 ms"\n' + slower + hosts + "\n".join(each))


def run(scheme, where, iterations=400, epoch=None):
    scenario = Scenario(
        cluster=where,
        scheme=parse_scheme(scheme),
        global_batch_size=8 * len(where),
        iterations=iterations,
        epoch_samples=epoch,
    )
    log = Log(workers=[Kept() for _ in where.workers], server=Kept())
    return simulate(scenario, log=log), log


def groups_of(log):
    return [event.groups for event in log.server if event.kind == "regroup"]


def told(log):
    """The events of the workers but for the scheme's and the bound's name, and what reached the server."""
    workers = [
        [replace(event, bound=None) if event.kind == "iteration" else event for event in each if event.kind != "run"]
        for each in log.workers
    ]
    return workers, [event for event in log.server if event.kind != "regroup"]


@pytest.mark.parametrize(("grouped", "plain"), [(1, "bsp:engine=server"), (6, "asp"), ("6,period=4", "asp:period=4")])
def test_one_group_is_a_barrier_and_groups_of_one_worker_are_none(grouped, plain):
    where = cluster(slowdown=2.3, workers=6)
    # An epoch of a length that no batch divides: the tails are alike too.
    _, one = run(f"grouped:groups={grouped}", where, iterations=40, epoch=6 * 8 * 13 + 5)
    _, other = run(plain, where, iterations=40, epoch=6 * 8 * 13 + 5)
    assert told(one) == told(other)


def test_steps_by_speed_save_waiting_in_a_group():
    where = cluster(slowdown=4, workers=8)
    equal, by_speed = (run(f"grouped:groups=2,period=8{more}", where)[0] for more in ("", ",steps=speed"))
    assert by_speed.samples == equal.samples == 400 * 8 * 8
    assert equal.waiting_share == pytest.approx(3 / 8 * 3 / 4)
    assert by_speed.waiting_share < 0.05
    # 7 and a quarter workers of 8, and what the ends of epochs cost.
    assert by_speed.samples_per_second == pytest.approx(7.25 / 8 * 8 * 8 / UNDISTURBED_SECONDS, rel=0.06)


@pytest.mark.parametrize("slowdown", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_one_slow_worker_of_16_costs_what_the_closed_form_says(slowdown, count):
    result, _ = run(f"grouped:groups={count}", cluster(slowdown), iterations=200)
    size = WORKERS / count
    expected = WORKERS / (WORKERS - size + size / slowdown)
    assert result.seconds / 200 / UNDISTURBED_SECONDS == pytest.approx(expected, rel=0.02)


def test_progressive_groups_cost_no_more_than_the_straggler_itself():
    result, log = run("grouped", cluster(4.0))
    assert result.seconds / 400 / UNDISTURBED_SECONDS < 1.1  # 1.05, and the iterations before it is known
    assert groups_of(log) == [[list(range(16))], [[w for w in range(16) if w != 5], [5]]]
    late = [event.behind for event in log.workers[5] if event.kind == "iteration"]
    # As predicted, which the limit of staleness rests on; one more where two end at the same time.
    assert 4 * 15 / 16 in late
    assert max(late) <= 5 * 15 / 16


def test_a_straggler_whose_group_would_be_too_stale_stays_with_the_others():
    _, log = run("grouped:behind=3", cluster(4.0), iterations=40)
    assert groups_of(log) == [[list(range(16))]]


@pytest.mark.parametrize("inside", ["bsp", "lb-bsp"])
def test_slowness_that_is_new_in_every_iteration_hardly_ever_forms_groups(inside):
    noisy = cluster(workers=8, noise=30)
    result, log = run(f"grouped:inside={inside}", noisy, iterations=300, epoch=64 * 40)
    assert len(groups_of(log)) <= 3  # Of sixty times that they are considered: what was formed is given up at once.
    barrier, _ = run("bsp:engine=server", noisy, iterations=300, epoch=64 * 40)
    assert result.seconds == pytest.approx(barrier.seconds, rel=0.02)


def test_what_sizes_even_out_needs_no_groups():
    _, log = run("grouped:inside=lb-bsp", cluster(4.0, workers=8), iterations=120, epoch=64 * 40)
    assert groups_of(log) == [[list(range(8))]]


def test_the_short_iterations_at_the_ends_of_epochs_form_no_groups():
    """Whoever is left there has less to do than ever, and not as much less as the others."""
    _, log = run("grouped", cluster(3.0, workers=8), iterations=200, epoch=64 * 20 + 24)
    assert groups_of(log) == [[list(range(8))], [[0, 1, 2, 3, 4, 6, 7], [5]]]


def test_the_groups_of_hosts_are_those_of_the_cluster_file():
    _, log = run("grouped:groups=hosts", cluster(more='host = "h{}"\n'), iterations=4)
    assert groups_of(log) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]]


def test_each_group_shares_out_its_part_of_the_batch():
    _, log = run("grouped:groups=2,inside=lb-bsp", cluster(3.0, slow=1, workers=4), iterations=60)
    plans = [event.batch_sizes for event in log.workers[0] if event.kind == "plan"]
    assert plans[0] == [8, 8, 8, 8]
    assert plans[-1] == [12, 4, 8, 8]


def test_groups_of_other_workers_than_there_are_are_refused():
    with pytest.raises(ConfigError, match="each of the workers 0 to 15 once"):
        run("grouped:groups=0-3/4-7", cluster())


def behind_links(hosts, workers):
    """So many hosts of so many workers each, which compute 10 ms a sample, and a server behind a link of 1 MB/s."""
    text = '[devices.one]\nper_sample = "10 ms"\n[links.lan]\nbandwidth = "8 Mbit/s"\nlatency = "0 s"\n'
    text += "".join(f'[hosts.h{number}]\nlink = "lan"\n' for number in (*range(hosts), "s"))
    text += "".join(f'[[workers]]\ndevice = "one"\nhost = "h{number}"\ncount = {workers}\n' for number in range(hosts))
    return parse_cluster(text + '[[servers]]\nhost = "hs"\n')


@pytest.mark.parametrize("across", ["asp", "bsp"])
def test_a_group_on_one_host_costs_the_network_what_one_worker_does(across):
    def of(where, scheme):
        scenario = Scenario(
            cluster=where, scheme=parse_scheme(scheme), global_batch_size=8 * len(where), iterations=30,
            epoch_samples=8 * len(where) * 10, message_bytes=100_000,
        )  # fmt: skip
        log = Log(workers=[Kept() for _ in where.workers], server=Kept())
        result = simulate(scenario, log=log)
        return result.seconds, sum(event.bytes for event in log.server if event.kind == "tally")

    alone = of(behind_links(2, 1), f"grouped:groups=2,across={across}")
    grouped = of(behind_links(2, 4), f"grouped:groups=hosts,across={across}")
    assert grouped == pytest.approx(alone)
    seconds, sent = of(behind_links(2, 4), f"grouped:groups=hosts,across={across},push_to=root")
    assert sent == pytest.approx(4 * grouped[1], rel=0.05)  # Of those under way when all is done, only one counts.
    assert seconds > 1.5 * grouped[0]

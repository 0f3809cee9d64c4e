"""The exchange of `diloco` on each wire, between two hosts: its time, its bytes, and what the simulator says.

Two network namespaces are the hosts, with a cable of 200 Mbit/s between them (token bucket filters) and two workers on
each. The model takes no time to compute and the period is one step, so an iteration is its exchange. Contestants take
turns, in alternating order.
"""

import sys

from harness import record
from harness.hosts import two_hosts
from server_hosts import pace_of

from evenstep.cluster import parse_cluster
from evenstep.schemes import parse_scheme
from evenstep.schemes.scheme import NARROWING
from evenstep.sim.network import Network

WIRES = ("float32", "bf16", "int8")
SCHEMES = {"bsp": "bsp"} | {wire: f"diloco:period=1,wire={wire}" for wire in WIRES}
MEGABITS, WORKERS, MODEL_BYTES = 200, 4, 25_000_000
CLUSTER = f"""
[links.cable]
bandwidth = "{MEGABITS} Mbit/s"
latency = "0 ms"
[hosts.a]
link = "cable"
[hosts.b]
link = "cable"
[devices.d]
per_sample = "1 ms"
[[workers]]
device = "d"
host = "a"
count = 2
[[workers]]
device = "d"
host = "b"
count = 2
"""


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="timed in every measurement")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 4.0
    raw = {name: {"seconds": [], "bytes": []} for name in SCHEMES}
    with two_hosts(MEGABITS) as hosts:
        for number in range(options.rounds):
            for name in reversed(SCHEMES) if number % 2 else SCHEMES:
                pace, sent = pace_of(hosts, WORKERS, SCHEMES[name], MODEL_BYTES, options.seconds)
                raw[name]["seconds"].append(WORKERS / pace)
                raw[name]["bytes"].append(sent * WORKERS / pace)
                record.console.print(f"  {number + 1}/{options.rounds} {name}: {WORKERS / pace:.3f} s an exchange")
    done = record.publish(
        "wire",
        "The exchange of diloco on each wire, between two hosts",
        options,
        config={"rounds": options.rounds, "seconds": options.seconds, "model_bytes": MODEL_BYTES, "schemes": SCHEMES},
        figures=list(_figures(raw)),
        raw=raw,
    )
    return 0 if done else 1


def _figures(raw):
    for name, found in raw.items():
        yield record.figure(f"{name}: an exchange", found["seconds"], unit="s")
        yield record.figure(f"{name}: over the time simulated", [each / simulated(name) for each in found["seconds"]])
        yield record.figure(f"{name}: sent by a host", [each / 1e6 for each in found["bytes"]], unit="MB")
    for kind, goals in (("seconds", {}), ("bytes", {"bf16": "<= 0.6", "int8": "<= 0.33"})):
        for name in ("bf16", "int8"):
            ratios = [one / other for one, other in zip(raw[name][kind], raw["float32"][kind], strict=True)]
            yield record.figure(f"{name} over float32, {kind}", ratios, goal=goals.get(name))


def simulated(name):
    network, outer = Network(parse_cluster(CLUSTER), message_bytes=MODEL_BYTES), parse_scheme(SCHEMES[name]).outer
    if outer is None:
        return network.all_reduce_seconds("ring")
    return network.all_reduce_seconds("ring", by_host=True, narrowing=NARROWING[outer.wire])


if __name__ == "__main__":
    sys.exit(main())

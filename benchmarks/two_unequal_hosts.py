"""Getting started's two machines, the second really slower: equal sizes and sizes by speed, by the page's own commands.

Two network namespaces are the hosts, with a core each, and the second has a quota of a third of its core. Nothing is
emulated. The script is the page's, examples/ddp_evenstep.py; its clock is that of the first host, from the line of the
first epoch to that of the last, with the evaluations in between, which each worker does whole.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from harness import competitors, record
from harness.hosts import PORT, two_hosts

SCRIPT = Path(__file__).parents[1] / "examples/ddp_evenstep.py"
SCHEMES = ("bsp", "lb-bsp")
QUOTA, PERIOD = 3_300, 10_000
"""Microseconds of the second host's core."""
EPOCHS = 20
SPEED = re.compile(r"trained ([\d,]+) samples/s")
CLAIM = re.compile(r"Training is .*?([\d.]+) to ([\d.]+)")
"""The ends of the interval, which are there whether or not it has an estimate."""


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    if (why := competitors.why_no_quota()) is not None:
        sys.exit(why)
    epochs, repetitions = (5, 1) if options.quick else (EPOCHS, options.repetitions)
    raw = {scheme: [] for scheme in SCHEMES}
    for number in range(repetitions):
        for scheme in reversed(SCHEMES) if number % 2 else SCHEMES:
            with tempfile.TemporaryDirectory() as folder:
                raw[scheme].append(_run(scheme, epochs, folder))
            record.console.print(f"  {number + 1}/{repetitions} {scheme}: {raw[scheme][-1]}")
    done = record.publish(
        "two_unequal_hosts",
        "Two hosts, one with a third of a core",
        options,
        config={"quota_microseconds": QUOTA, "period_microseconds": PERIOD, "epochs": epochs, "schemes": SCHEMES},
        figures=list(_figures(raw)),
        raw=raw,
    )
    return 0 if done else 1


def _figures(raw):
    for name, unit in (("samples/s", ""), ("seconds", "s")):
        for scheme, runs in raw.items():
            yield record.figure(f"{scheme}: {name}", [each[name] for each in runs], unit=unit)
    pairs = list(zip(raw["lb-bsp"], raw["bsp"], strict=True))
    gains = [even["samples/s"] / plain["samples/s"] for even, plain in pairs]
    yield record.figure("gain in samples/s", gains)
    yield record.figure("gain by the clock", [plain["seconds"] / even["seconds"] for even, plain in pairs])
    claims = [(each["claim"], gained) for each, gained in zip(raw["lb-bsp"], gains, strict=True) if each["claim"]]
    if claims:
        for name, ends in zip(("lower", "upper"), zip(*(claim for claim, _ in claims), strict=True), strict=True):
            yield record.figure(f"{name} end of the gain that the summary of lb-bsp claims", list(ends))
        held = sum(low <= gained <= high for (low, high), gained in claims) / len(claims)
        yield record.figure("claims whose interval holds the gain in samples/s, of all", [held])


def _run(scheme, epochs, folder):
    """What the first host prints: samples/s, the seconds from the first epoch's end to the last's, and the claim."""
    with two_hosts() as hosts, _quota() as group:
        started = [
            _start(node, host, hosts[0].address, scheme, epochs, folder, group) for node, host in enumerate(hosts)
        ]
        try:
            ends, printed = [], []
            for line in started[0].stdout:
                printed.append(line)
                if line.startswith("epoch "):
                    ends.append(time.monotonic())
            said = " ".join("".join(printed).split())
            if any(each.wait() for each in started):
                raise RuntimeError(f"{scheme} failed: {said}")
        finally:
            for each in started:
                each.kill()
                each.wait()
                each.stdout.close()
    claim = CLAIM.search(said)
    return {
        "samples/s": float(SPEED.search(said)[1].replace(",", "")),
        "seconds": ends[-1] - ends[0],
        "claim": [float(each) for each in claim.groups()] if claim else None,
    }


def _start(node, host, address, scheme, epochs, folder, group):
    words = [sys.executable, "-m", "evenstep.cli.main", "run", "--nnodes", "2", "--node-rank", str(node)]
    words += ["--master-addr", address, "--master-port", str(PORT), "--scheme", scheme]
    words += ["--run-dir", f"{folder}/{node}", str(SCRIPT), "--epochs", str(epochs)]
    slowed = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] if node else []
    return subprocess.Popen(
        [*slowed, "taskset", "-c", str(node), *host.command(*words)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


@contextmanager
def _quota():
    """The folder of a control group with the quota."""
    folder = competitors.GROUPS / f"evenstep-hosts-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
        (folder / "cpu.cfs_quota_us").write_text(str(QUOTA))
        yield folder
    finally:
        folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())

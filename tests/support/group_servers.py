"""Runs a function in several real workers, of which some push to a server of their group, as those of other hosts do.

The group servers run the server program itself, with a parent that they reach over TCP, as between hosts.
"""

import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers
from support.processes import run_workers
from support.served import environment, forked, serving

DYING = Path(__file__).with_name("dying_server.py")


def run_grouped(function, groups, *arguments, run_dir, behind, network=False, dying=None, **settings):
    """Every worker's outcome of `function(*arguments)`; the groups whose numbers are in `behind` have a server.

    `network`: workers reach theirs over TCP too. `dying`: a `Dying` server. `settings` are the server program's.
    """
    workers = sum(map(len, groups))
    settings = {"snapshots": str(run_dir / "snapshots"), "count": 1, "workers": workers, **settings}
    with ExitStack() as stack:
        if dying is not None and dying.group is None:
            addresses, secret = stack.enter_context(dying.started(settings))
        else:
            (addresses,), secret = stack.enter_context(serving(settings, 1))
        reached = [addresses] * workers
        for group in behind:
            told = {**settings, "index": 0, "parent": [each for each in addresses if each.startswith("tcp:")]}
            if dying is not None and dying.group == group:
                server, _ = stack.enter_context(dying.started(told, secret))
            else:
                server = stack.enter_context(forked(told, secret))
            for worker in groups[group]:
                reached[worker] = server
        environments = [environment([each], secret, run_dir, network=network) for each in reached]
        return run_workers(placed, workers, environments, function, *arguments, environment={})


@dataclass(frozen=True)
class Dying:
    """The server of a group, or the parent (None): it dies before it passes on pushes, or commits, for this time."""

    group: int | None
    number: int
    restarts: int = 1

    @contextmanager
    def started(self, told, secret=None):
        """Its addresses and the secret; in the end it has died, once."""
        events = []
        settings = ServerSettings(
            count=1,
            workers=told["workers"],
            snapshots=Path(told["snapshots"]),
            secret=secret,
            parent=tuple(told.get("parent", ())),
            name="" if self.group is None else "the server of the group",
            restarts=self.restarts,
            command=(sys.executable, str(DYING), "0", str(self.number)),
        )
        with Servers(settings, events.append) as servers:
            yield servers.addresses[0], servers.secret
        (event,) = events
        assert event.text == self.text

    @property
    def text(self):
        if self.group is None:
            return "server 0 was killed by SIGKILL; all start again from their last snapshot (1 of 1)"
        died = "the server of the group was killed by SIGKILL"
        return f"{died}; it starts again (1 of 1)" if self.restarts else f"{died}; no restart is left of 0"


def placed(environments, function, *arguments):
    """The function in this worker's own environment, by rank."""
    os.environ.update(environments[int(os.environ["RANK"])])
    return function(*arguments)

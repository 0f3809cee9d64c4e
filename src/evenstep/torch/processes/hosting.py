"""Servers that run as children of a worker's process."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

from evenstep.launch.c10d import Store
from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers
from evenstep.telemetry.say import say
from evenstep.torch.failure import when_failing

POLL_SECONDS: Final = 0.2
"""The time between checks whether the servers should end."""
ASK_SECONDS: Final = 0.02
"""The time between questions whether any worker still uses the servers, once the script has ended."""


@final
class Hosting:
    """Starts servers and keeps them until the other workers no longer need them, or this script has failed.

    Args:
        settings: The settings of the servers.
        scratch: A folder that is removed with the servers.
        store: Tells the others how to reach the servers. This process may hold it, and it must not close before them.
        outlived: Whether the servers outlive a failure of this script, for the other workers, and end by themselves.

    Raises:
        ConfigError: The servers could not be started.
    """

    def __init__(
        self,
        settings: ServerSettings,
        scratch: TemporaryDirectory[str] | None = None,
        store: Store | None = None,
        *,
        outlived: bool = False,
    ) -> None:
        self._present: Mapping[str, object] = {}
        """The latest report about the workers at the servers."""
        self._told = threading.Event()
        self.servers = Servers(settings, lambda event: say(event.text), self._take_in)
        self._outlived = outlived
        self._store = store
        self._scratch = scratch
        self._failed = threading.Event()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._lost = False
        when_failing(self, Hosting.fail)
        atexit.register(self._exit)
        # Not a daemon: the process stays until the others have finished, too.
        self._thread = threading.Thread(target=self._keep, name="evenstep-hosting", daemon=False)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """The folder that is removed with the servers."""
        assert self._scratch is not None
        return Path(self._scratch.name)

    def fail(self, error: BaseException) -> BaseException:
        """Note that this script fails with that error."""
        self._failed.set()
        return error

    def end(self) -> None:
        """End the servers when all other workers have finished, or at once if this script fails. Can be repeated."""
        if isinstance(sys.exc_info()[1], Exception):
            self._failed.set()
        with self._ending:
            if self._ended.is_set():
                return
            if threading.current_thread() is not self._thread and self._await_others():
                return  # The script continues, while the thread waits for workers that were given up and may come back.
            if self._failed.is_set() and self._outlived:
                self.servers.abandon()
            else:
                self.servers.close()
            if self._scratch is not None:
                self._scratch.cleanup()
            self._ended.set()
            if not self._lost:
                atexit.unregister(self._exit)

    def _keep(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._ended.is_set():
            main.join(POLL_SECONDS)
        while not self._ended.is_set() and self._await_others():
            time.sleep(POLL_SECONDS)
        self.end()

    def _exit(self) -> None:
        """Fail at exit if a worker is lost, so that the launcher, which also waits for that worker, ends it."""
        if self._lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _await_others(self) -> bool:
        """Wait until no worker uses the servers, even if they are restarted; notes whether a worker is lost.

        Returns:
            Whether a worker that was given up may still come back.
        """
        while self.servers.lost is None and not self._failed.is_set() and not self._ended.is_set():
            self._told.clear()
            self.servers.ask_for_present()
            # The script and the thread may both wait, and the answer to one serves the other too.
            if self._told.wait(POLL_SECONDS) and not self._present["here"]:
                self._lost = bool(self._present.get("lost"))
                return bool(self._present.get("awaits"))
            time.sleep(ASK_SECONDS)
        return False

    def _take_in(self, event: Mapping[str, object]) -> None:
        if event.get("event") == "present":
            self._present = event
            self._told.set()

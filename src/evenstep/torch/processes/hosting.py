"""Servers that a worker's process hosts, as its children."""

import atexit
import os
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

from evenstep.launch.c10d import Store
from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.messages import ANSWERED, Drain, Drained
from evenstep.telemetry.events import ServerFailed, ServersLost, ServersRestarted
from evenstep.telemetry.say import say
from evenstep.torch.failure import when_failing
from evenstep.transport.base import SilentError
from evenstep.transport.connect import connect

POLL_SECONDS: Final = 0.2
"""How often to check whether the servers are to end."""


@final
class Hosting:
    """Starts servers and keeps them until the other workers are done with them, or this script has failed.

    Args:
        settings: What the servers are told.
        scratch: Removed with the servers.
        store: Where the others read how to reach the servers. It may be this process's, and must not close before.
        outlived: Whether the servers go on when this script fails, for the other workers, and end by themselves.

    Raises:
        ConfigError: They could not be started.
    """

    def __init__(
        self,
        settings: ServerSettings,
        scratch: TemporaryDirectory[str] | None = None,
        store: Store | None = None,
        *,
        outlived: bool = False,
    ) -> None:
        self.servers = Servers(settings, _say)
        self._outlived = outlived
        self._store = store
        self._scratch = scratch
        self._failed = threading.Event()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._lost = False
        when_failing(self, Hosting.fail)
        atexit.register(self._exit)
        # Not a daemon: the process stays until the others are done too.
        self._thread = threading.Thread(target=self._keep, name="evenstep-hosting", daemon=False)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """The folder that is removed with the servers."""
        assert self._scratch is not None
        return Path(self._scratch.name)

    def fail(self, error: BaseException) -> BaseException:
        """This script fails with that error."""
        self._failed.set()
        return error

    def end(self) -> None:
        """End the servers once all other workers are done, or at once if this script fails. Twice does no harm."""
        if isinstance(sys.exc_info()[1], Exception):
            self._failed.set()
        with self._ending:
            if self._ended.is_set():
                return
            if threading.current_thread() is not self._thread and self._await_others():
                return  # The script goes on, and the thread waits for workers that were given up and may come back.
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
        """Fail at exit if a worker is lost: the launcher, which also waits for that worker, then ends it."""
        if self._lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _await_others(self) -> bool:
        """Wait until no worker is at the servers, also if they are restarted; notes whether a worker is lost.

        Returns:
            Whether a worker that was given up may still come back.
        """
        secret = bytes.fromhex(self.servers.secret)
        while self.servers.lost is None and not self._failed.is_set():
            try:
                with closing(connect(self.servers.addresses[0], secret=secret)) as connection:
                    connection.send(encode(Drain()))
                    while not self._failed.is_set():
                        with suppress(SilentError):
                            told = decode(ANSWERED, connection.receive(POLL_SECONDS).header)
                            self._lost = isinstance(told, Drained) and told.lost
                            return isinstance(told, Drained) and told.awaits
            except ConnectionError:
                time.sleep(POLL_SECONDS)
        return False


def _say(event: ServersRestarted | ServersLost | ServerFailed) -> None:
    say(event.text)

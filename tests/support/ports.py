"""Ports for processes that listen where they are told."""

import random
import socket
from contextlib import suppress


def free_port():
    """A port on which nobody listens, below those that the system gives to connections and to listeners of port 0."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port

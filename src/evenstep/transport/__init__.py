"""Moves bytes between workers and servers: messages of a header, a payload and, on one host, open files."""

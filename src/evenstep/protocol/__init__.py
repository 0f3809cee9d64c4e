"""The messages between workers, servers and group servers."""

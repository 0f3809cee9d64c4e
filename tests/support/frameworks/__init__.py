"""The task that every framework trains on, the table of frameworks, and a run of several worker processes."""

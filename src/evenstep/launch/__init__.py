"""Starts and watches the processes of a run."""

"""Other people's formats, each fed from the event log: it costs training nothing, and works live and afterwards.

A sink is a `Recorder` for the events of all workers and servers of a run.
"""

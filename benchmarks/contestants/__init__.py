"""Who is compared in `exchange.py`: a module each, with functions `measure(case) -> Measured` of one signature.

A contestant starts its server and its workers, lets every worker exchange for the case's seconds, and ends them.
"""

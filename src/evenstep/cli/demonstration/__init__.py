"""The script that `evenstep demo` runs.

Its folder is its own because Python first looks for imports beside a script: beside the subcommands, `profile.py` would
hide the module `profile` of the standard library.
"""

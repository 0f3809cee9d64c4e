"""The script that `evenstep demo` runs.

It is in a separate folder because Python first looks for imports beside the script: in the parent folder `profile.py`
of a subcommand would hide the module `profile` of the standard library.
"""

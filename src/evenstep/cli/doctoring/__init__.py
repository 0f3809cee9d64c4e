"""The script that `evenstep doctor` runs, in a folder without the subcommands: `profile.py` would hide a module."""

"""The script that `evenstep demo` runs, in a folder of its own: Python first looks for imports beside a script."""

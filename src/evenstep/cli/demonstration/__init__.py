"""What `evenstep demo` runs.

A folder of its own: Python looks beside a script for what it imports, and one of the subcommands' files is called
`profile`, as a module of the standard library is.
"""

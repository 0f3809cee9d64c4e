"""The command `evenstep`: one file per subcommand."""

"""The command `evenstep`: one file per verb."""

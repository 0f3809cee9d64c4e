"""The processes of a run: they meet, agree, and notice when one is gone."""

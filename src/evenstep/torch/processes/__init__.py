"""The processes of a run: how they meet, agree, and notice that one is gone."""

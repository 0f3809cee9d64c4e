"""Shows what happened: from recorded events to values, tables and pictures. Knows nothing of how a run is done."""

"""Reports on runs: turns recorded events into values, tables and plots. Independent of how a run is carried out."""

"""The metrics of a run in files and experiment trackers."""

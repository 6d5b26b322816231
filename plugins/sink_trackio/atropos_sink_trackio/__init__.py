"""The metrics of a run in Trackio."""

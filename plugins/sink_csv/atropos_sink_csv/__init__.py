"""The metrics of a run as one CSV table."""

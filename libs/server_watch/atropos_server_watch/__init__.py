"""Deadlines for servers that Atropos did not start."""

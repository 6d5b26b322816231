"""A module of the contract v1."""

TASKS = ()  # which a Taskset would load

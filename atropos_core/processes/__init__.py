"""A component in a process of its own, and the calls to it."""

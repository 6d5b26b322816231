"""A bridge that sends what an update changed: indices and values, not whole models."""

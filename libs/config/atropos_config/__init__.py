"""Print the values of a run file, and its JSON Schema."""

"""A run file and its components, validated."""

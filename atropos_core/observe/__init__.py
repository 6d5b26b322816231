"""Where time and memory go."""

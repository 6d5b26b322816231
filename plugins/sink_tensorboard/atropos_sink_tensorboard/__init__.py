"""The metrics of a run as TensorBoard event files."""

"""The metrics of a run in Weights & Biases."""

"""The metrics of a run in MLflow."""

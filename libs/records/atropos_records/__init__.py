"""Export and audit the recorded rollouts and checkpoints of runs."""

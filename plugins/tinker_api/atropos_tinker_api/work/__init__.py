"""Training and sampling: how requests reach the trainer and the engine."""

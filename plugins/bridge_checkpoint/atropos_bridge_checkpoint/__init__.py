"""A bridge over whole checkpoints on disk."""

"""A trainer, an engine and a bridge for a Tinker server."""

"""The content of the server's directory: sessions, models, journals, checkpoints."""

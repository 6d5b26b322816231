"""Parts that several environment plugins share."""

"""Parts that adapters to other frameworks share."""

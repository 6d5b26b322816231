"""What the server has acknowledged, kept on disk: the log, and the hub's store on it."""

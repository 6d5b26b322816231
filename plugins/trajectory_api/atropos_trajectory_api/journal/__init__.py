"""What the server acknowledged, on disk: the log, and the hub's store on it."""

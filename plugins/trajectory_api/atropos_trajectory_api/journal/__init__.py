"""The server's groups on disk: a log of what was acknowledged, and the hub's store on top of it."""

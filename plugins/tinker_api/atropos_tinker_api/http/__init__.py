"""The HTTP endpoints of the protocol."""

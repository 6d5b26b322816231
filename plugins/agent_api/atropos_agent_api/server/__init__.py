"""The HTTP server of the API, inside the loop of the process that has the sessions."""

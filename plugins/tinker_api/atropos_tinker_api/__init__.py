"""A local server for the Tinker protocol: `atropos tinker`."""

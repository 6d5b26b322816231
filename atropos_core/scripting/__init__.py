"""The commands as functions, for scripts and notebooks (docs/python.md)."""

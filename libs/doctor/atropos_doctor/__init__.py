"""Check a machine, or a running or finished run."""

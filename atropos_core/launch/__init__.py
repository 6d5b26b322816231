"""From a plan to a running run and to its end: memory plan, assembly, the supervisor, signals."""

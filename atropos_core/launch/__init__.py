"""From a plan to a living run and to its end: memory plan, assembly, the supervisor, signals."""

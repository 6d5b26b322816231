"""The commands that are one part of a run: env, train, engine, process."""

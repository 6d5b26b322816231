"""The commands that run one part of a run (serve, train, env, engine, process), and what they run."""

"""Where an agent runs: the sandboxes `process`, `bubblewrap`, `local` and `docker`. docs/agent-sandboxes.md says what each holds."""

"""Sandboxes in which agents run. docs/agent-sandboxes.md says what each one prevents."""

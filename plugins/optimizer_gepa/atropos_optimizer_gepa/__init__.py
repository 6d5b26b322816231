"""Reflective prompt evolution: a trainer whose weights are a prompt, and the environments that use this prompt."""

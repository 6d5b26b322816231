"""Reflective prompt evolution: a trainer whose weights are a prompt, and the environments that it is put in front of."""

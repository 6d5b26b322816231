"""Calls of an OpenAI-compatible server."""

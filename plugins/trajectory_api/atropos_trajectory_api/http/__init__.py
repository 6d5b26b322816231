"""Shared by the HTTP endpoints: who may call, answers in JSON, and calls whose bodies are frames."""

"""Evaluate a policy, or a model behind an OpenAI-compatible server, on held-out problems."""

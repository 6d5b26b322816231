"""An engine that samples from a vLLM server, which it starts and ends itself, or which already runs."""

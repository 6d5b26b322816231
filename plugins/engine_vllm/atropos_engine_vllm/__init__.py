"""An engine that samples from a vLLM server: one that it starts and ends itself, or one that runs already."""

"""What runs inside vLLM's own processes: only this package imports vllm, and nothing but vLLM's plugin loader imports it."""

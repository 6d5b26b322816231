"""What runs inside vLLM's own processes. Only this package imports vllm, and nothing imports this package but vLLM's
plugin loader.
"""

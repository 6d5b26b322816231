"""Code that runs inside vLLM's own processes. Only this package imports vllm, and only vLLM's plugin loader imports
this package.
"""

"""Limits shared by the engine and its memory plan. Imports nothing."""

KEPT = 1 << 26  # bytes: a KV cache up to this size is kept during an update
BLOCKED_FROM = 10_000_000  # elements of a model's matrices
BLOCKED_BYTES = 2 << 30  # a model whose matrices have at most this size keeps a second copy of them: blocked_weights.py

"""Limits shared by the engine and its memory plan. Imports nothing."""

KEPT = 1 << 26  # bytes: a KV cache up to this size is kept during an update

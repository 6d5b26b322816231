"""What the engine and its memory plan both go by. Imports nothing."""

KEPT = 1 << 26  # bytes of keys and values: so few stay where they are while an update runs

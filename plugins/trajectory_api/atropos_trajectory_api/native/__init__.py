"""The endpoints of Atropos's own protocol: `/v1`, and shared-memory rings for workers on the same machine."""

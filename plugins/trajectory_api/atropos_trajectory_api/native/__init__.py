"""The protocol of our own, under /v1: draws, groups, leases, rings of the same machine."""

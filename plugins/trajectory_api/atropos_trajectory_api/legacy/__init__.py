"""The old Atropos protocol: fourteen keys, batches, masks of -100."""

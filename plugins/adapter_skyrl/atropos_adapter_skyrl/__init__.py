"""Train in SkyRL on Atropos environments."""

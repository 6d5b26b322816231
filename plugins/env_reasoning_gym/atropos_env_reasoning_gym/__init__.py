"""The task generators of reasoning-gym as environments, scored by their own scorers."""

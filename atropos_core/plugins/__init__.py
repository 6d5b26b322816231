"""Plugins: what one may offer (spec, provider), and how they are found, loaded and named (manager, registry, references)."""

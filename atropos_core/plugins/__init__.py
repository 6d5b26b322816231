"""What a plugin may offer (spec, provider), and how it is found, loaded and named (manager, registry, references)."""

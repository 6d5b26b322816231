"""What this package offers."""

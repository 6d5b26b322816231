"""The trajectory API: `atropos serve`, and the roles that meet there."""

"""Runs as jobs of a Slurm cluster."""

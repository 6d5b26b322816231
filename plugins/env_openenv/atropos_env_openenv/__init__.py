"""Environments behind a server of OpenEnv."""

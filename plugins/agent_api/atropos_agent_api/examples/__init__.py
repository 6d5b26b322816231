"""Agents that come with the project."""

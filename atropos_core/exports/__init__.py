"""Rollouts and policies in the forms that other libraries read (docs/export.md)."""

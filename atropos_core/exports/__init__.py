"""Export rollouts and policies in forms that other libraries read (docs/export.md)."""

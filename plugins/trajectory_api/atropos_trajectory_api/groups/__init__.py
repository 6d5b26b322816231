"""Frames with groups from outside: how they are read and checked."""

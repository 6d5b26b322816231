"""Environments that were written for atroposlib, by import and without it."""

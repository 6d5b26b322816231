"""What this package offers. Nothing yet but the parts that others are built on."""

from __future__ import annotations

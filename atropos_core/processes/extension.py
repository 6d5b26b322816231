"""A bridge's own code at one of its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Extension:
    """What the bridge's code gave for a component, and the calls that the bridge makes on it."""

    def __init__(self, made: Any) -> None:
        self._made = made

    @classmethod
    def load(cls, reference: str, component: Any) -> Extension:
        """`reference`: "pkg.mod:function", which is called with the component."""
        from atropos_core.plugins.references import load_reference

        return cls(load_reference(reference)(component))

    async def call(self, method: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> Any:
        """`descriptors` are the extension's from here on; the keyword is left out where there are none."""
        keywords = {"descriptors": list(descriptors)} if descriptors else {}
        return await getattr(self._made, method)(*arguments, **keywords)

"""A bridge's extension in the process of an engine or a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Extension:
    """The object that the bridge's code made for a component, and the calls that the bridge makes on it."""

    def __init__(self, made: Any) -> None:
        self._made = made

    @classmethod
    def load(cls, reference: str, component: Any) -> Extension:
        """Make the extension. `reference`: "pkg.mod:function", which is called with the component."""
        from atropos_core.plugins.references import load_reference

        return cls(load_reference(reference)(component))

    async def call(self, method: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> Any:
        """Call a method. The extension owns `descriptors` from then on; the keyword is omitted if there are none."""
        keywords = {"descriptors": list(descriptors)} if descriptors else {}
        return await getattr(self._made, method)(*arguments, **keywords)

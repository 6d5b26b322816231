"""The core of Atropos: the vocabulary, the hooks and the loop. No ML framework inside."""

import pluggy

__version__ = "0.1.0"

hookimpl = pluggy.HookimplMarker("atropos")
hookspec = pluggy.HookspecMarker("atropos")

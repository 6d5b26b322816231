"""Pictures in terminals that show them: kitty's graphics protocol, and iTerm2's inline images.

https://sw.kovidgoyal.net/kitty/graphics-protocol and https://iterm2.com/documentation-images.html
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

CHUNK = 4096  # of base64, which kitty takes at once


def escapes(png: bytes, environment: Mapping[str, str]) -> str:
    """Return the escape codes that show this PNG in the terminal described by these variables. Empty if it is not known to
    support either protocol, and inside tmux and screen, which support neither."""
    if "TMUX" in environment or environment.get("TERM", "").startswith(("screen", "tmux")):
        return ""
    program = environment.get("TERM_PROGRAM", "")
    if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return f"\x1b]1337;File=inline=1;size={len(png)};preserveAspectRatio=1:{b64encode(png).decode()}\a\n"
    if "KITTY_WINDOW_ID" in environment or "kitty" in environment.get("TERM", "") or program == "ghostty":
        return _kitty(b64encode(png).decode())
    return ""


def _kitty(data: str) -> str:
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    said = [
        f"\x1b_G{'a=T,f=100,' if not at else ''}m={int(at + 1 < len(parts))};{part}\x1b\\"
        for at, part in enumerate(parts)
    ]
    return "".join(said) + "\n"

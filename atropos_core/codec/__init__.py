"""Records <-> bytes: how anything crosses a process boundary here. `frames` is the form; `columns`, how a scored group lies in it."""

from atropos_core.codec.frames import (
    MAGIC,
    MAX_IMPLIED_BYTES,
    OPTIONAL,
    PREFIX,
    PREFIX_BYTES,
    RECORDS,
    Buffer,
    decode,
    encode,
    encode_bytes,
    frame_size,
    framed,
)

__all__ = [
    "MAGIC",
    "MAX_IMPLIED_BYTES",
    "OPTIONAL",
    "PREFIX",
    "PREFIX_BYTES",
    "RECORDS",
    "Buffer",
    "decode",
    "encode",
    "encode_bytes",
    "frame_size",
    "framed",
]

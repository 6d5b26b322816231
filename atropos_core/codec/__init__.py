"""Records <-> bytes: how data crosses process boundaries. `frames` is the format; `columns` is the layout of a scored group in it."""

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

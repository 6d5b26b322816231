"""What Weights & Biases' own service wrote of offline runs, read off its files."""

from __future__ import annotations

import json
import struct

from wandb.proto.wandb_internal_pb2 import Record


def records(folder):
    """The records of every offline run under `folder`, in order of their start. The format is LevelDB's log: blocks of
    32 KiB; each piece has a checksum, a length and a type (whole, first, middle, last); seven bytes stand before all."""
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def history(folder):
    """{step: metrics} of all runs there."""
    found = {}
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            line = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = line.pop("_step")
            found[step] = {name: value for name, value in line.items() if not name.startswith("_")}
    return found


def runs(folder):
    return [record.run for record in records(folder) if record.WhichOneof("record_type") == "run"]

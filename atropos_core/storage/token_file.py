"""`rollouts/step-000001.safetensors`: per-token values of a step, in columns over all sequences (docs/records.md).

Any safetensors reader can open it. Sequence s is `[sequence_offsets[s], sequence_offsets[s + 1])` of every token column.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from atropos_core.storage.atomic import write_whole

FORMAT = "1"
TOKEN_COLUMNS = {  # [N]
    "ids": "I32", "sampled": "BOOL", "trained": "BOOL", "logprobs": "F32", "versions": "I32", "advantages": "F32",
}  # fmt: skip
OPTIONAL_COLUMNS = ("trainer_logprobs", "entropy", "teacher_logprobs", "ref_logprobs")  # [N] float32
KEPT_SIZES, KEPT_IDS = (
    "kept_sizes",
    "kept_ids",
)  # int32: [N] how many tokens top_p, top_k, min_p kept, and [K] their ids
EXPERTS_KNOWN, EXPERT_NUMBERS = (
    "experts_known",
    "experts",
)  # bool [N] whether a token's experts are recorded, and [R, L, k] their numbers, uint8 or uint16: k of each of L layers
SEQUENCE_COLUMNS = {"episodes": "I32", "temperature": "F32", "truncated": "BOOL"}  # [S]
OFFSETS = "sequence_offsets"  # [S + 1] int64


def write_token_file(path: Path, columns: Mapping[str, NDArray[Any]]) -> int:
    """Write the file and return its size in bytes. Raises OSError."""
    from safetensors.numpy import save

    content = save(dict(columns), {"format": FORMAT})
    write_whole(path, content)
    return len(content)

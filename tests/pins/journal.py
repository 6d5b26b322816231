"""The directory of an `atropos serve` of an earlier Atropos that was killed: of four groups the first was committed, the second
trained, the third leased, and nobody had requested the fourth.

`python -m tests.pins.journal` writes data/journal.tar.gz anew, with the code of that day.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

from atropos_core.codec import encode_bytes
from tests.native_payloads import native_call, native_group, open_session, put_request
from tests.raw_http import Connection
from tests.served import atropos_serve, serving

RECORDED = Path(__file__).parent / "data/journal.tar.gz"
TOKENS = [[1, 2, 3, 4, 5], [1, 2, 6, 7, 5]]


def group(number: int) -> dict[str, Any]:
    """As the old protocol has it; its first score is its number."""
    masks = [[-100, -100, *ids[2:]] for ids in TOKENS]
    logprobs = [[0.0, 0.0, -0.5, -0.25, -0.125] for _ in TOKENS]
    return {"tokens": TOKENS, "masks": masks, "inference_logprobs": logprobs, "scores": [float(number), 0.5]}


def lease(end: Connection, session: int, groups: int, trained: tuple[int, ...] = ()) -> list[Any]:
    body = {"groups": groups, "version": 0, "trained": list(trained), "wait_s": 2.0}
    return list(native_call(end, f"/v1/sessions/{session}/lease", body)["entries"])


def write(folder: Path, output: Path) -> None:
    with serving(atropos_serve("--dir", str(folder)), output) as server:
        end = Connection(server.port)
        for number in (1, 2, 3, 4):
            answer = end.call(
                put_request(f"key-{number}", "", encode_bytes(native_group(group(number), "words", -number)))
            )
            assert answer.status == 200, answer.body
        session = open_session(end, 1, 2)
        [first] = lease(end, session, 1)
        native_call(end, f"/v1/sessions/{session}/commit", {"ids": [first["id"]]})
        [second] = lease(end, session, 1)
        native_call(end, f"/v1/sessions/{session}/renew", {"trained": [second["id"]]})
        [_] = lease(end, session, 1)
        server.process.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write(Path(made) / "api", Path(made) / "output")
        with tarfile.open(RECORDED, "w:gz") as packed:
            for path in sorted((Path(made) / "api").rglob("*")):
                if path.is_file():
                    packed.add(path, path.relative_to(made))

"""Either end of a ring is killed at random moments. `python -m tests.unit.shm.test_ring_kills 1000` kills more often."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ring_kills import Kills, kill_consumers, kill_producers

KILLS = 12


@pytest.mark.parametrize("kill", [kill_producers, kill_consumers])
def test_whichever_end_is_killed_no_message_is_torn_lost_or_doubled_and_nothing_is_left(kill, tmp_path):
    seen = kill(tmp_path, KILLS, seed=7)
    check(seen, KILLS)


def check(seen: Kills, kills: int) -> None:
    assert len(seen.noticed_s) == kills and seen.messages > kills
    assert max(seen.noticed_s) < 10, "milliseconds if nothing else runs"
    assert (seen.descriptors, seen.mappings, seen.files) == (0, 0, 0)


if __name__ == "__main__":
    for way in (kill_producers, kill_consumers):
        with tempfile.TemporaryDirectory() as folder:
            seen = way(Path(folder), int(sys.argv[1]), seed=0)
            check(seen, int(sys.argv[1]))
            ms = sorted(1000 * seconds for seconds in seen.noticed_s)
            print(
                f"{way.__name__}: {seen.messages:,} messages; noticed after {statistics.median(ms):.2f} ms, at most {ms[-1]:.1f}"
            )

"""A supervisor that test_sandbox_kills.py kills: it keeps programs with daemons running until then.

`python -m plugins.agent_api.tests.sandbox_supervisor NAME FOLDER MARK`; prints the sandbox's folder once it starts programs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from plugins.agent_api.tests.sandboxes import MADE, NETWORK, program, run

TEXT = "setsid sh -c 'setsid sleep 60 & sleep 60' & echo x > left; sleep 0.1"


async def main(name: str, folder: Path, mark: str) -> None:
    sandbox = MADE[name]()
    await sandbox.open()
    print(sandbox.folder(), flush=True)

    async def one(at: int) -> None:
        for turn in range(1000):
            argv = ["sh", "-c", TEXT]
            await run(
                sandbox,
                program(folder, argv, name=f"p{at}-{turn}", network=NETWORK[name], environment={"MARK": mark}),
            )

    await asyncio.gather(*map(one, range(3)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))

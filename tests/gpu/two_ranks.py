"""Two processes of bridge "nccl" on one device: `python -m tests.gpu.two_ranks DEVICE RANK PORT` is one of them.

On a CPU they join over gloo. NCCL joins no two processes on one GPU, and each must say so: on machines that a launcher names, no plan can
see that two devices are one.
"""

from __future__ import annotations

import asyncio
import sys

from tests.gpu.pair import ROOT, Setting
from tests.gpu.report import Report

JOINED = "joined"
DEADLINE_S = 60.0


async def two_ranks(setting: Setting, report: Report) -> None:
    first = await _started(setting.device, 0, 0)
    assert first.stdout is not None
    try:
        port = int(await first.stdout.readline())
        second = await _started(setting.device, 1, port)
    except BaseException:
        first.kill()
        raise
    both = (first, second)
    try:
        said = [out.decode().strip() for out, _ in await asyncio.gather(*(one.communicate() for one in both))]
    finally:
        for one in both:
            if one.returncode is None:
                one.kill()
    for rank, text in enumerate(said):
        if setting.device == "cpu":
            report.holds(f"rank {rank} over gloo (a CPU has no NCCL: NOT RUN)", text == JOINED, text)
        else:
            named = text.startswith("FitError") and "cannot join the others" in text and "over nccl" in text
            report.holds(f"rank {rank} over NCCL, with the other on its GPU, is refused", named, text[:1000])


async def _started(device: str, rank: int, port: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, device, str(rank), str(port), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )


def main() -> None:
    from tests.gpu.pair import SOURCES

    sys.path[:0] = SOURCES
    import torch

    from atropos_bridge_nccl.group import Group
    from atropos_core.errors import AtroposError
    from atropos_torch_models.network import LOOPBACK, listen

    device, rank, port = torch.device(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    listening = None
    if rank == 0:
        listening = listen(LOOPBACK)
        port = listening.getsockname()[1]
        print(port, flush=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    where = {"host": LOOPBACK, "port": port, "size": 2, "number": 7, "deadline_s": DEADLINE_S}
    try:
        Group({**where, "backend": "nccl" if device.type == "cuda" else "gloo"}, rank, device, listening)
        print(JOINED, flush=True)
    except AtroposError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()

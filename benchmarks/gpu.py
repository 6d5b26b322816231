"""The checks of tests/gpu and their figures, with nothing installed but torch and transformers.

    python -m benchmarks.gpu [--device cuda:0] [--parameters 3e9] [--small] [--only NAME ...] [--commit HASH] [--out FILE]

Run in the root of a checkout, on a machine where nothing else uses the GPU. `--device cpu --parameters 50e6 --small` goes
through the same code over POSIX shared memory. On a GPU it writes benchmarks/results/gpu.json, where the checks that `--only` leaves out
stay as they were; each names its commit and its machine. Ends with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, described
from tests.gpu.pair import SOURCES, Setting


def arguments() -> argparse.Namespace:
    from tests.gpu.checks import CHECKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parameters", type=float, default=3e9, help="of the model whose size is looked at")
    parser.add_argument("--small", action="store_true", help="the updates of training_*: on a tiny model, 256 tokens")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME")
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


async def run(options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    from atropos_core.guards.deadlines import within
    from tests.gpu.checks import CHECKS
    from tests.gpu.report import CheckFailed, Report

    setting = Setting(options.device, options.parameters, options.small)
    results: dict[str, Any] = {}
    for check in CHECKS:
        if options.only and check.name not in options.only:
            continue
        print(check.name, flush=True)
        report = Report(lambda line: print(line, flush=True))
        began = time.perf_counter()
        failure = None
        try:
            await within(check.run(setting, report), check.deadline_s, check.name)
            report.settle()
        except CheckFailed as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 - one broken check must not keep the others from being run
            failure = f"{type(error).__name__}: {error}"
            print(f"  FAILED {failure}", flush=True)
        results[check.name] = {
            "failure": failure,
            "seconds": round(time.perf_counter() - began, 1),
            "figures": report.figures,
            "machine": where,
        }
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
    results = asyncio.run(run(options, where))
    out = options.out or (RESULTS / "gpu.json" if options.device != "cpu" else None)
    if out:
        before = json.loads(out.read_text())["checks"] if options.only and out.exists() else {}
        out.write_text(json.dumps({"checks": before | results}, indent=1) + "\n")
    failed = [name for name, result in results.items() if result["failure"]]
    print(f"{len(results) - len(failed)} of {len(results)} hold" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""What bridge `delta` saves: python -m benchmarks.delta   (as root: it makes a second network namespace, and shapes the link to it)

1. How many elements an update of ours changes, in weights of 32 and of 16 bits, at several learning rates (AdamW, engine `hf` and trainer
   `grpo` on this machine), what travels, and what theory says that these changes take: log2 C(n, k) / 8 + k * size bytes for each tensor.
2. `checkpoint` and `delta` beside each other: an `atropos engine` in another network namespace, behind a link of 100 Mbit/s (tc tbf on both
   ends), a random Qwen3 with weights of 16 bits. The two alternate in one run; bytes are counted by the link itself.

Every engine is compared with the trainer bit for bit after each update. Writes benchmarks/results/delta.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from atropos_core.config import run_file as config
from atropos_core.launch.builder import build
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import load_plugins
from atropos_testing.bridge_setup import Scene, connect
from benchmarks.machine import RESULTS, described

RATES = (1e-6, 1e-5, 3e-4)
MBIT = 100
BURST = "64kb"  # of the token bucket: a few frames
WARM = 2  # updates at the start that are not counted: AdamW's first steps are of full size everywhere
NETWORK = f"10.214.{os.getpid() % 250}"


@asynccontextmanager
async def opened(model: str, values: Mapping[str, Any], folder: Path) -> AsyncIterator[Scene]:
    plugins = load_plugins()
    none = {"environment": {"none": {"use": "atropos_testing.samples:TwoSums"}}, "sink": {}}
    plan = make_plan(
        config.load([config.Layer("benchmark", {**none, **values}, whole=True)]).config,
        plugins.resolve_model(model),
        plugins,
    )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    parts = await build(plan, folder)
    try:
        yield await connect(plan, parts)
    finally:
        await parts.close()


async def update(scene: Scene, version: int) -> None:
    batch = await scene.batch(version)
    await scene.parts.trainer.step(batch, lambda: scene.parts.bridge.writing(version))


async def same_bits(scene: Scene) -> bool:
    ends = [scene.parts.trainer.endpoint, *(engine.endpoint for engine in scene.parts.engines)]
    return len({(await end.call("digest", deadline_s=600))[0] for end in ends}) == 1


async def shares(model: str, dtype: str, rate: float, updates: int, folder: Path) -> dict[str, Any]:
    values = {
        "engine": {"use": "hf", "threads": 1, "dtype": dtype},
        "trainer": {"use": "grpo", "threads": 1, "dtype": dtype, "learning_rate": rate},
        "bridge": {"use": "delta"},
    }
    seen: list[Mapping[str, Any]] = []
    async with opened(model, values, folder) as scene:
        for version in range(1, WARM + updates + 1):
            await update(scene, version)
            if version > WARM:
                seen.append(dict(scene.parts.bridge.update))  # type: ignore[attr-defined]
            if not await same_bits(scene):
                raise SystemExit(f"{dtype}, {rate}: after update {version} the engine's weights are others")
    whole = seen[0]["elements"] * {"float32": 4, "bfloat16": 2}[dtype]
    return {
        "dtype": dtype,
        "learning_rate": rate,
        "changed": statistics.mean(one["changed"] / one["elements"] for one in seen),
        "bytes": statistics.mean(one["size"] for one in seen),
        "of_whole": statistics.mean(one["size"] for one in seen) / whole,
        "of_theory": statistics.mean(one["size"] / one["least"] for one in seen),
        "of_theory_most": max(one["size"] / one["least"] for one in seen),
        "updates": len(seen),
    }


def random_model(folder: Path, hidden: int, layers: int) -> Path:
    """A Qwen3 of random weights of 16 bits, with the tiny policy's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = load_plugins().resolve_model("tiny").directory
    directory = folder / "model"
    shutil.copytree(tiny, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    made = AutoConfig.from_pretrained(tiny)
    made.update({"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers})
    if getattr(made, "layer_types", None):
        made.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@contextmanager
def link() -> Iterator[tuple[str, str, str]]:
    """Another network namespace, its address, and our end of the link to it."""
    name, ours, theirs = f"atropos{os.getpid()}", f"ad{os.getpid() % 10000}a", f"ad{os.getpid() % 10000}b"
    shaped = f"root tbf rate {MBIT}mbit burst {BURST} latency 400ms"
    made = [
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs} netns {name}",
        f"ip addr add {NETWORK}.1/24 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} addr add {NETWORK}.2/24 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
        f"ip -n {name} link set lo up",
        f"tc qdisc add dev {ours} {shaped}",
        f"ip netns exec {name} tc qdisc add dev {theirs} {shaped}",
    ]
    try:
        for command in made:
            subprocess.run(command.split(), check=True)
        yield name, f"{NETWORK}.2", ours
    finally:
        subprocess.run(["ip", "link", "delete", ours], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def sent(card: str) -> int:
    return int(Path(f"/sys/class/net/{card}/statistics/tx_bytes").read_text())


@contextmanager
def engine_there(network: str, address: str, model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """`atropos engine --bridge delta`, which takes whole models as well. Its URL, and the file of its token."""
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    command = [
        "ip", "netns", "exec", network, sys.executable, "-m", "atropos_core", "engine", "--model", str(model), "--bridge", "delta",
        "--host", address, "--port", "8001", "--token-file", str(token), "--set", "engine.dtype=bfloat16",
        "--set", "engine.threads=1",
    ]  # fmt: skip
    out = folder / "engine.out"
    with out.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        until = time.monotonic() + 300
        while f"http://{address}:8001" not in out.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the engine did not start:\n{out.read_text()}")
            time.sleep(0.2)
        yield f"http://{address}:8001", token
    finally:
        process.terminate()
        process.wait(60)


async def over_the_link(
    rate: float, updates: int, rounds: int, hidden: int, layers: int, folder: Path
) -> dict[str, Any]:
    model = random_model(folder, hidden, layers)
    seen: dict[str, list[dict[str, float]]] = {"checkpoint": [], "delta": []}
    with link() as (network, address, card), engine_there(network, address, model, folder) as (url, token):
        for number in range(rounds):
            for bridge, found in seen.items():
                values = {
                    "engine": {"use": "remote", "url": url, "token_file": str(token)},
                    "trainer": {"use": "grpo", "threads": 1, "dtype": "bfloat16", "learning_rate": rate},
                    "bridge": {"use": bridge},
                }
                before = sent(card)
                async with opened(str(model), values, folder / f"{bridge}-{number}") as scene:
                    begin = sent(card) - before
                    for version in range(1, WARM + updates + 1):
                        batch, before = await scene.batch(version), sent(card)
                        await scene.parts.trainer.step(batch, lambda: scene.parts.bridge.writing(version))  # noqa: B023
                        if (published := scene.parts.bridge.published) is not None and version > WARM:
                            found.append({
                                "publish_s": published.seconds, "bytes": published.bytes_copied, "sent": sent(card) - before,
                                "at_start": begin,
                            })  # fmt: skip
                        if bridge == "delta" and not await same_bits(scene):
                            raise SystemExit(f"after update {version} the engine's weights are others")
    middle = {
        bridge: {key: statistics.median(one[key] for one in found) for key in found[0]} | {"updates": len(found)}
        for bridge, found in seen.items()
    }
    return {
        "mbit_per_s": MBIT,
        "learning_rate": rate,
        "weights_bytes": (model / "model.safetensors").stat().st_size,
        **middle,
        "checkpoint_over_delta": middle["checkpoint"]["publish_s"] / middle["delta"]["publish_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="of both bridges over the link")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate over the link")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    chosen = parser.parse_args()
    result: dict[str, Any] = {"machine": described()}
    with tempfile.TemporaryDirectory(prefix="atropos-benchmark-") as directory:
        folder = Path(directory)
        tables = [
            asyncio.run(shares("tiny", dtype, rate, chosen.updates, folder / f"{dtype}-{rate}"))
            for dtype in ("float32", "bfloat16")
            for rate in RATES
        ]
        print(f"{'weights':10}{'rate':>8}{'changed':>10}{'bytes':>12}{'of whole':>10}{'of theory':>11}{'most':>7}")
        for row in tables:
            print(
                f"{row['dtype']:10}{row['learning_rate']:8.0e}{row['changed']:10.2%}{row['bytes']:12,.0f}{row['of_whole']:10.1%}"
                f"{row['of_theory']:11.3f}{row['of_theory_most']:7.3f}"
            )
        result["shares"] = tables
        far = asyncio.run(
            over_the_link(chosen.rate, chosen.updates, chosen.rounds, chosen.hidden, chosen.layers, folder)
        )
    result["link"] = far
    for bridge in ("checkpoint", "delta"):
        one = far[bridge]
        print(
            f"{bridge:12}{one['publish_s']:8.2f} s{one['bytes']:14,.0f} bytes, {one['sent']:14,.0f} on the link; "
            f"{one['at_start']:14,.0f} at the start"
        )
    print(f"checkpoint / delta: {far['checkpoint_over_delta']:.1f} times the time, over {MBIT} Mbit/s")
    (RESULTS / "delta.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

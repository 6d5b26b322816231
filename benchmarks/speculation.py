"""Tokens per second of engine "vllm" with and without `speculation = "ngram"`, on a CPU: python -m benchmarks.speculation [--model MODEL].

Greedy and sampled replies of SmolLM2-135M-Instruct (or another model) to two requests: to repeat a given text, for which proposals are
right, and to tell a story, for which they are mostly wrong. One request at a time and eight at once, float32, eager, one thread. Servers
with and without are started in turn, twice each, and the median of all repetitions counts. Writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, described
from benchmarks.pretrained import add_model, directory

TEXT = (
    "The grey heron stood by the river for an hour, and then it caught a small silver fish near the old wooden bridge. A boy who had"
    " watched it from the path ran home, told his sister what he had seen, and drew the bird on the back of a letter."
)
REQUESTS = {"copy": f"Repeat this text word for word: {TEXT}", "story": "Tell a story about a lighthouse keeper."}
AT_ONCE = (1, 8)
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 60
STARTS, REPEATS = 2, 3
DEADLINE_S = 300.0


async def measure(model: Path, folder: Path, options: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return tokens/s, acceptance and acceptance length of each repetition, by what was asked."""
    from atropos_core.rollouts.tokenizer import ChatTokenizer
    from atropos_core.types import Sampling
    from tests.vllm.hosted import hosted

    tokenizer = ChatTokenizer(model)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    settings = {"max_model_len": 512, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
    async with hosted(model, folder, **settings, **options) as served:
        for name, text in REQUESTS.items():
            prompt = tokenizer.render([{"role": "user", "content": text}])
            for temperature in TEMPERATURES:
                for n in AT_ONCE:
                    of = found[f"{name}, temperature {temperature:g}, {n} at once"]
                    for repetition in range(1 + REPEATS):
                        await served.engine.step_metrics()
                        began = time.perf_counter()
                        sampling, seeds = Sampling(MAX_TOKENS, temperature), range(n * repetition, n * repetition + n)
                        made = await served.engine.sample(prompt, n, sampling, seeds, DEADLINE_S)
                        seconds = time.perf_counter() - began
                        if repetition:  # the first fills the prefix cache
                            of["tokens_per_s"].append(sum(len(one.tokens) for one in made) / seconds)
                            for metric, value in (await served.engine.step_metrics()).items():
                                of[metric].append(value)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    model, machine = directory(parser.parse_args().model), described()
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculation": "ngram"}}
    every: dict[str, dict[str, dict[str, list[float]]]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as folder:
        for start in range(STARTS):
            for kind, options in kinds.items():
                for name, found in (await measure(model, Path(folder, f"{kind}{start}"), options)).items():
                    of = every[kind].setdefault(name, defaultdict(list))
                    for metric, values in found.items():
                        of[metric] += values
    rows = {}
    for name, plain in every["plain"].items():
        ngram = every["ngram"][name]
        row = {"plain_tokens_per_s": plain["tokens_per_s"], "ngram_tokens_per_s": ngram["tokens_per_s"]}
        row |= {metric: ngram[metric] for metric in ("draft_acceptance", "acceptance_length") if ngram[metric]}
        rows[name] = {metric: round(statistics.median(values), 3) for metric, values in row.items()}
        rows[name]["times"] = round(rows[name]["ngram_tokens_per_s"] / rows[name]["plain_tokens_per_s"], 2)
        print(f"{name:36} {json.dumps(rows[name])}")
    result = {
        "machine": machine,
        "model": model.name,
        "max_tokens": MAX_TOKENS,
        "repetitions": STARTS * REPEATS,
        "requests": rows,
    }
    (RESULTS / "speculation.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())

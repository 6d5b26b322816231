"""A pretrained model of 135 million parameters learns from rewards on a CPU, under several seeds.

    python -m benchmarks.real_learning --model SmolLM2-135M-Instruct [--seeds 3]

The model is given a word and says which of four kinds it is: animal, food, tool or clothing. Four earlier turns, a word of each
kind, show what a reply looks like. A third of the words are held out from training. `accuracy` is the share of them whose
reply is right, `answered` the share whose reply is one of the four kinds, so what `answered` gains is form, and the rest is choice.
Before training the model names a kind most of the time, but seldom the right one: a constant reply would be right on a quarter.

The run file is benchmarks/real_learning.toml. The greedy accuracy on held-out words, before and after, goes into
benchmarks/results/real_learning.json, a row for each seed as it ends, and the page of the first seed into real_learning.html next to
it. Ends with 1 if a seed gained less than GAIN.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atropos_core.rollouts.evaluation_statistics import wilson
from benchmarks.machine import RESULTS, described

GAIN = 0.25
RUN_S = 7200.0
RUN_FILE = Path(__file__).with_suffix(".toml")
OUT = RESULTS / "real_learning.json"
TASK = "Sort each word: animal, food, tool or clothing. Reply with one word."
SHOWN = {"animal": "cat", "food": "bread", "tool": "hammer", "clothing": "shirt"}
HELD_OUT = 96  # of 256 values of a hash
WORDS = {
    "animal": """
        dog horse cow sheep goat pig lion tiger wolf fox bear rabbit mouse rat squirrel deer elephant giraffe zebra
        camel monkey donkey kangaroo whale dolphin shark salmon tuna eel frog toad snake lizard turtle crocodile eagle
        hawk owl crow sparrow pigeon duck goose swan chicken parrot penguin bee ant spider butterfly
    """,
    "food": """
        cheese butter apple pear banana orange grape cherry peach lemon melon carrot potato tomato onion garlic
        cabbage lettuce spinach bean pea rice pasta noodle soup stew pizza sandwich burger sausage bacon ham steak egg
        yogurt cream honey jam sugar salt pepper cake cookie pie biscuit chocolate candy muffin pancake cereal salad
    """,
    "tool": """
        saw drill screwdriver wrench pliers chisel axe shovel spade rake hoe ladder rope chain nail screw bolt
        anvil file clamp vise crowbar mallet pickaxe scissors knife needle pump jack lever pulley winch hook wheelbarrow
        broom mop bucket brush trowel sander grinder lathe tongs tweezers stapler ruler level compass torch sickle plow
        scythe
    """,
    "clothing": """
        trousers skirt dress coat jacket sweater sock shoe boot sandal slipper hat cap scarf glove mitten belt tie
        vest blouse jeans shorts pajamas robe apron uniform suit tuxedo gown cloak cape hood hoodie cardigan stocking
        tights underwear bra bikini swimsuit raincoat poncho sneaker helmet veil turban beret kimono sari kilt overalls
    """,
}


def rows() -> dict[str, list[dict[str, Any]]]:
    """Return every word as a row of the environment `dataset`, by split."""
    before = [{"role": "system", "content": TASK}]
    for kind, word in SHOWN.items():
        before += [{"role": "user", "content": word}, {"role": "assistant", "content": kind}]
    made: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for kind, words in WORDS.items():
        for word in words.split():
            held_out = blake2b(word.encode(), digest_size=8).digest()[0] < HELD_OUT
            row = {"prompt": [*before, {"role": "user", "content": word}], "answer": kind}
            made["test" if held_out else "train"].append(row)
    return made


def write_rows(folder: Path) -> None:
    for split, some in rows().items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def learn(model: Path, seed: int, page: Path | None) -> dict[str, Any]:
    """Train with this seed, and return the figures of before and after."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_rows(folder)
        (folder / "run.toml").write_text(RUN_FILE.read_text())
        atropos = [sys.executable, "-m", "atropos_core"]
        subprocess.run(
            [*atropos, "run", "run.toml", "--model", str(model.absolute()), "--seed", str(seed), "--dir", "run"],
            cwd=folder, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seconds = round(time.monotonic() - began)
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        if page is not None:
            subprocess.run(
                [*atropos, "view", "run", "--html", str(page), "--html-mb", "1", "--force"],
                cwd=folder, check=True, timeout=600, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    return {
        "seed": seed,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "seconds": seconds,
    } | figures(metrics)


def figures(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return accuracy with its 95 % interval and the share of replies that name a kind, before and after; and the mean reward of
    each step."""
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    sides = {}
    for name, row in (("before", evaluated[0]), ("after", evaluated[-1])):
        accuracy, problems = row["eval/accuracy"], int(row["eval/problems"])
        sides[name] = {
            "accuracy": round(accuracy, 4),
            "interval": [round(end, 3) for end in wilson(accuracy, problems)],
            "answered": round(row["eval/answered"], 4),
            "failed": row["eval/failed"],
            "problems": problems,
        }
    trained = [row for row in metrics if "reward/mean" in row]
    return {
        **sides,
        "steps": len(trained),
        "step_s": [round(row["time/step_s"], 1) for row in trained],
        "rewards": [round(row["reward/mean"], 3) for row in trained],
    }


def record(learned: Sequence[Mapping[str, Any]]) -> float:
    """Write the rows with the least gain of a seed, and return it."""
    least = min(row["after"]["accuracy"] - row["before"]["accuracy"] for row in learned)
    found = {
        **described(),
        "model": "SmolLM2-135M-Instruct",
        "chance": 0.25,
        "least_gain": round(least, 3),
        "rows": learned,
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the directory of SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    learned: list[dict[str, Any]] = []
    least = 0.0
    for seed in range(given.seeds):
        learned.append(learn(given.model, seed, OUT.with_suffix(".html") if seed == 0 else None))
        print(learned[-1], flush=True)
        least = record(learned)
    return int(least < GAIN)


if __name__ == "__main__":
    sys.exit(main())

"""The environment of recipe `laptop-smollm2-135m`: say which of four kinds a thing is.

Four earlier turns, a word of each kind, show what a reply looks like. A third of the words are held out. The metric `answered` is the
share of replies that are one of the kinds, so that what a policy gains by the form of its replies can be told from what it gains by
their choice. A constant reply is right for a quarter of the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from atropos_core import Environment, Score, Task
from atropos_core.types import Message

INSTRUCTION = "Sort each word: animal, food, tool or clothing. Reply with one word."
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


class WordSorting(Environment):
    """1 for a reply that is the kind of the word and nothing else."""

    def __init__(self) -> None:
        turns: list[Message] = [{"role": "system", "content": INSTRUCTION}]
        for kind, word in SHOWN.items():
            turns += [{"role": "user", "content": word}, {"role": "assistant", "content": kind}]
        self._tasks: dict[str, list[Task]] = {"train": [], "test": []}
        for kind, words in WORDS.items():
            for word in words.split():
                split = "test" if blake2b(word.encode(), digest_size=8).digest()[0] < HELD_OUT else "train"
                prompt = (*turns, {"role": "user", "content": word})
                self._tasks[split].append(Task(word, prompt, answer=kind))

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks[split]

    async def score(self, task: Task, reply: Message) -> Score:
        said = reply["content"].strip()
        correct = said == task.answer
        return Score(float(correct), correct=correct, metrics={"answered": float(said in WORDS)})

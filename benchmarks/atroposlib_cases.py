"""What the sweep gives to each of atroposlib's environment files: rows of data, files beside it, settings, replies.

Every name of the hub is one table here, with the columns that such tables usually have, those that the file names somewhere, and what
its case says. `Case.right` and `Case.wrong` are what the scripted model says: texts, or functions of the prompt's text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Reply = str | Callable[[str], str]

RIGHT = "<think>two and two make four</think> <answer>4</answer> \\boxed{4} The answer is A. #### 4"
WRONG = "<think>who knows what this may be</think> <answer>7</answer> \\boxed{7} The answer is B. #### 7"
ROW: dict[str, Any] = {
    **dict.fromkeys(
        ("question", "problem", "prompt", "instruction", "query", "input", "text", "content"), "What is 2 + 2?"
    ),
    **dict.fromkeys(("solution", "output", "response", "completion", "chosen"), "It is \\boxed{4}. #### 4"),
    "answer": "2 + 2 is 4. #### 4",
    "final_answer": "4",
    "ground_truth": "4",
    "choices": ["4", "7", "8", "9"],
    "options": ["4", "7", "8", "9"],
    "messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}],
    "conversation": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}],
    "conversations": [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}],
    "subject": "maths",
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
SUM = {"name": "add", "description": "adds", "parameters": {"a": {"type": "int"}, "b": {"type": "int"}}}
OPENING = [
    {"from": "system", "value": f"You have tools. <tools>{json.dumps(SUM)}</tools>"},
    {"from": "human", "value": "Add 2 and 2."},
]
CALLED = [
    {"from": "gpt", "value": f"<think>\nadd\n</think>\n{CALL}"},
    {"from": "tool", "value": "<tool_response>\n4\n</tool_response>"},
]
ANSWERED = [{"from": "gpt", "value": "<think>\ndone\n</think>\nIt is 4."}]
TOOLS = {
    "conversations": [*OPENING, *CALLED, *ANSWERED]
}  # a conversation with one call, as tables of tool calls have them
TWO_STEPS = {"conversations": [*OPENING, *CALLED, *CALLED, *ANSWERED]}
TWO_TURNS = {"conversations": [*OPENING, *CALLED, *ANSWERED, *OPENING[1:], *CALLED, *ANSWERED]}
CALLS = {
    "right": f"<think>\nadd them\n</think>\n{CALL}",
    "wrong": f"<think>\nadd them\n</think>\n{CALL.replace('2', '3')}",
}
LETTERED = {"right": "<think>so</think> The best answer is: A", "wrong": "<think>so</think> The best answer is: C"}


@dataclass(frozen=True)
class Case:
    columns: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)  # columns of every other row
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(
        default_factory=dict
    )  # path from the checkout's root on: text, bytes, or what is JSON
    models: Sequence[str] = ()  # of the hub that the file loads by itself: each is the policy's
    splits: Sequence[str] = ()  # of its tables, beside the usual ones
    right: Reply = RIGHT
    wrong: Reply = WRONG
    judges: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # a prompt that has this: two verdicts

    def reply(self, prompt: str, right: bool, count: int) -> str:
        """`count` of replies came before it: those of a kind differ in length."""
        for mark, verdicts in self.judges.items():
            if mark in prompt:
                return verdicts[not right]
        said = self.right if right else self.wrong
        text = said if isinstance(said, str) else said(prompt)
        return text.replace("</think>", f"{' well' * (count % 5)}</think>", 1)


def case_of(file: str) -> Case:
    return CASES.get(file, Case())


def found(pattern: str, template: str, otherwise: str = "4") -> Callable[[str], str]:
    """The last that the prompt has of a pattern, put into a text."""

    def reply(prompt: str) -> str:
        every = re.findall(pattern, prompt, re.DOTALL)
        return template.replace("@", str(every[-1]) if every else otherwise)

    return reply


def reversed_text(prompt: str) -> str:
    text = re.findall(r"The text to reverse:\n(.*?)(?:<\||$)", prompt, re.DOTALL)
    return f"<think>backwards</think>\n<reversed_text>{text[-1][::-1] if text else ''}</reversed_text>"


GRID = [{"input": [[1, 2]], "output": [[2, 1]]}]
EVALUATED: dict[str, dict[str, Any]] = {  # columns of the tables that evaluations read
    "agieval_eval.py": {"gold": [0], "choices": ["(A) 4", "(B) 7"]},
    "aime_eval.py": {"answer": "4"},
    "aimo_eval.py": {"answer": 4},
    "arc_agi_eval.py": {"fewshots": GRID, "question": GRID},
    "arc_eval.py": {"choices": {"text": ["4", "7"], "label": ["A", "B"]}, "answerKey": "A"},
    "bbh_eval.py": {"target_idx": 0, "task_prefix": "", "example_input_prefix": "Q: ", "choice_prefix": " C: "},
    "drop_eval.py": {
        "passage": "Two and two are four.",
        "answer": {"number": "4", "date": {"day": "", "month": "", "year": ""}, "spans": []},
        "validated_answers": {"number": [], "date": [], "spans": []},
    },
    "gpqa_eval.py": {
        "Question": "What is 2 + 2?",
        "Correct Answer": "4",
        **{f"Incorrect Answer {at}": str(at + 6) for at in (1, 2, 3)},
    },
    "hellaswag_eval.py": {
        "activity_label": "Sums",
        "ctx_a": "Two and two",
        "ctx_b": "are",
        "endings": ["4", "7", "8", "9"],
        "label": "0",
    },
    "hle_eval.py": {"answer": "4", "image": "", "category": "Maths"},
    "ifeval_eval.py": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "math500_eval.py": {"answer": "4", "level": 1},
    "math_eval.py": {"level": "Level 1", "type": "Algebra", "solution": "It is \\boxed{4}."},
    "mmlu_eval.py": {"answer": 0},
    "mmlu_pro_eval.py": {"answer_index": 0, "category": "math"},
    "mtbench_eval.py": {
        "turns": ["What is 2 + 2?", "And 3 more?"],
        "reference": ["4", "7"],
        "question_id": 1,
        "category": "math",
    },
    "obqa_eval.py": {
        "question_stem": "What is 2 + 2?",
        "choices": {"text": ["4", "7"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "olympiadbench_eval.py": {
        "final_answer": "4",
        "is_multiple_answer": False,
        "answer_type": "Numerical",
        "unit": "",
    },
    "phybench_eval.py": {"answer": "4", "tag": "MECHANICS"},
    "piqa_eval.py": {"goal": "Add", "sol1": "4", "sol2": "7", "label": 0},
    "pubmedqa_eval.py": {"QUESTION": "Is it 4?", "CONTEXTS": ["It is 4."], "final_decision": "yes", "PUBID": 1},
    "simpleqa_eval.py": {"answer": "4", "metadata": {"topic": "sums"}},
    "siqa_eval.py": {"context": "Ada adds.", "answerA": "4", "answerB": "7", "answerC": "8", "label": "1"},
    "winogrande_eval.py": {"sentence": "2 + 2 is _.", "option1": "4", "option2": "7", "answer": "1"},
}
WEATHER = "environments/community/meteorology_forecast/data"


def calls_then_says(steps: int) -> Callable[[str], str]:
    """The call, until there were so many answers to it since the user spoke last; then what came of it."""

    def reply(prompt: str) -> str:
        answers = prompt.rpartition("Add 2 and 2.")[2].count("</tool_response>")
        return CALLS["right"] if answers < steps else ANSWERED[0]["value"]

    return reply


def counted_letters(prompt: str) -> str:
    one = re.findall(r"How many (\w)s are in the string (\w+)\?", prompt)
    several = re.findall(r"of the letters (.*?) in the string (\w+)", prompt)
    if several and not one:
        letters, text = several[-1]
        counts = {letter: text.lower().count(letter) for letter in re.findall(r"'(\w)'", letters)}
        return f"<think>so</think><answer>{json.dumps(counts)}</answer>"
    letter, text = one[-1] if one else ("e", "tree")
    return f"<think>so</think><answer>{text.lower().count(letter)}</answer>"


ACTS = {
    "right": '<think>so</think>\n<tool_call>{"name": "take_action", "arguments": {"action": "stick"}}</tool_call>',
    "wrong": '<think>so</think>\n<tool_call>{"name": "take_action", "arguments": {"action": "hit"}}</tool_call>',
}
CARD = {
    "Character": "A monk", "Prompt": "Bread?", "Left_Choice": "Yes", "Right_Choice": "No", "category": "piety",
    **{f"{side}_{what}": 1 for side in ("Left", "Right") for what in ("Piety", "Stability", "Power", "Wealth")},
}  # fmt: skip

VERIFIERS = """import verifiers
from datasets import Dataset


def load_environment():
    rows = Dataset.from_list([{"question": "What is 2 + 2?", "answer": "4"}] * 64)

    def right(completion, **more):
        return float("boxed{4}" in completion[-1]["content"])

    return verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.Rubric(funcs=[right]))
"""
PIXEL = base64.b64decode(  # a PNG of one white pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)
OURS = "http://policy.invalid/v1"  # a judge there is the policy
SUMS = {"id": "sums", "header": ["a", "b"], "types": ["text", "text"], "rows": [["2", "4"], ["3", "7"]]}
ASKED = {"table_id": "sums", "question": "Which b has 2?", "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "2"]]}}
PATCH = "### sums.py\n<<<<<<< SEARCH\n2 + 2 = 5\n=======\n2 + 2 = 4\n>>>>>>> REPLACE"
QUESTION = {
    "text": "What is 2 + 2?",
    "category": "math",
    "difficulty": "basic",
    "expected_specialties": ["accuracy"],
    "description": "a sum",
}
WALLET = {"address": f"0x{'1' * 40}", "private_key": f"0x{'1' * 64}"}

CASES: dict[str, Case] = {
    **{f"eval_environments/{name}": Case(columns) for name, columns in EVALUATED.items()},
    "answer_format_environment/answer_format_environment.py": Case(
        config={
            "supported_formats": ["xml"],
            "dataset_configs": [
                {
                    "name": "gsm8k",
                    "split": "train",
                    "sample_size": 50,
                    "prompt_field": "question",
                    "answer_field": "answer",
                    "metadata_fields": [],
                    "dataset_type": "math_only",
                }
            ],
        },
        right="<think>so</think>\n<answer>4</answer>",
        wrong="<think>so</think>\nIt is a 4, I say.",
    ),
    "mcqa_thinking_env.py": Case({"answer": 0, "ground_truth": "A"}, **LETTERED),
    "fundamental_prediction_environment.py": Case(
        {"context": "Sales rose.", "answer": "raised", "magnitude": "5.0", "fundamental_metric": "revenue"},
        right="<think>so</think> The revenue will be: raised and the magnitude will be: 5.0%",
        wrong="<think>so</think> The revenue will be: reduced and the magnitude will be: 5.0%",
    ),
    "instruction_following_algorithm_environment.py": Case(
        {"ground_truth": json.dumps({"func_name": "verify_keywords", "keyword_list": ["example"]})},
        right="<think>so</think> This is an example of a reply.",
        wrong="<think>so</think> This is another kind of a reply.",
    ),
    "text_reversal_environment.py": Case({"text": "abc def ghi jkl mno"}, right=reversed_text),
    "tool_calling_server.py": Case(TOOLS, **CALLS),
    "tool_use_multiturn_server.py": Case(TWO_TURNS, right=calls_then_says(1), wrong=CALLS["wrong"]),
    "tool_use_turnlevel_advantage_server.py": Case(TWO_STEPS, right=calls_then_says(2), wrong=CALLS["wrong"]),
    "tool_use_interleaved_thinking.py": Case({"answer": "4"}),
    "community/mcp_tool_calling/tool_calling_server.py": Case(TOOLS, **CALLS),
    "community/wikipedia_research/tool_calling_server.py": Case(TOOLS, **CALLS),
    "community/wikipedia_research/wikipedia_article_creator.py": Case(
        right="<think>so</think>\nFinal Step: ```markdown\n# Sums\n\n## Two\n\nTwo and two are four.\n\n## More\n\nSo it is.\n```",
        wrong="<think>so</think>\nFinal Step: ```markdown\nTwo.\n```",
    ),
    "math_server_zero.py": Case(
        {"answer": "4", "final_answer": "4"}, right="two and two </think> <answer>\\boxed{4}</answer>"
    ),
    "rlaif_server.py": Case(judges={"esponse A": ("It is \\boxed{A}", "It is \\boxed{B}")}),
    "community/philosophical_rlaif_env.py": Case(judges={"esponse A": ("It is \\boxed{A}", "It is \\boxed{B}")}),
    "community/regex_generation/regex_env.py": Case(
        right="<think>so</think> <answer>.+</answer>", wrong="<think>so</think> <answer>zzz</answer>"
    ),
    "community/accessibility_env/accessibility_env.py": Case(
        files={
            "environments/community/accessibility_env/data/accessibility_dataset.jsonl": [
                {"id": str(at), "html": "<img src='a.png'>", "issues_to_fix": ["missing_alt_text"]} for at in range(16)
            ]
        },
        right="<html lang='en'><body><img src='a.png' alt='a picture'></body></html>",
        wrong="<html lang='en'><body><img src='a.png'></body></html>",
    ),
    "gsm8k_server_teacher_distill.py": Case(config={"teacher_enabled": False}),
    "dataset_environment/dataset_env.py": Case(
        config={"dataset_name": "anyone/any", "prompt_field": "question", "answer_field": "answer"}
    ),
    "community/dynastai/dynastai_server.py": Case(
        files={"environments/community/dynastai/dynastai_cards.json": [{"input": {"choice_history": []}}]},
        right=json.dumps(CARD),
        wrong=json.dumps({**CARD, "category": "weather"}),
    ),
    "community/cat_behavior_env/cat_server.py": Case(
        files={
            "environments/community/cat_behavior_env/cat_scenarios.json": [{"scenario": "The cat is hungry."}] * 4,
            "environments/community/cat_behavior_env/cat_behaviors.json": [{"behavior": "purr", "description": "glad"}],
        },
        right="Purr!",
        wrong="Meow!",
    ),
    "community/meteorology_forecast/meteorology_env.py": Case(
        files={
            f"{WEATHER}/20250314/KABR/KABR_RAP_20250314_00Z.buf_default_llm_optimized.jsonl": [
                {"tm": "250314/0600", "t": 1}
            ],
            f"{WEATHER}/20250314/KABR/AFD_1.txt": "It will rain.",
        },
        right="It will rain.\nFORECAST_SUMMARY: rain",
        wrong="FORECAST_SUMMARY: sun",
        judges={
            "REASONING_SCORE": (
                "REASONING_SCORE: 4\nTOOL_CALL_SCORE: 2\nFORECAST_SUMMARY_SCORE: 3\nJUSTIFICATION: so",
                "REASONING_SCORE: 1\nTOOL_CALL_SCORE: 0\nFORECAST_SUMMARY_SCORE: 1\nJUSTIFICATION: so",
            )
        },
    ),
    "community/protein_design/protein_env.py": Case({"receptor": "MKT", "peptide": "GSH"}),
    "letter_counting_environment/letter_counting_environment.py": Case(
        {"Prompt": "How many es are in the string tree?", "Answer": "2", "DifficultyLevel": 1},
        files={"nltk_data/corpora/words/en": "letter\nbanana\npepper\ncoffee\nbottle\nlittle\n" * 20},
        right=counted_letters,
        wrong="<think>so</think><answer>77</answer>",
    ),
    "pydantic_schema_following_environment/pydantic_schema_following_environment.py": Case(
        {
            "verification_info": json.dumps(
                {
                    "pydantic_config": "from pydantic import BaseModel\nclass M(BaseModel):\n    a: int",
                    "model_name": "M",
                }
            ),
            "problem_id": "1",
            "task_type": "generation",
        },
        config={"allowed_structured_formats": ["json"], "allowed_container_formats": ["tagged"]},
        right='<think>so</think><json_output>{"a": 4}</json_output>',
        wrong='<think>so</think><json_output>{"a": "four"}</json_output>',
    ),
    "reasoning_gym_environment/reasoning_gym_environment.py": Case(config={}),
    "game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py": Case(**ACTS),
    "game_environments/gymnasium/blackjack/blackjack_env_thinking.py": Case(**ACTS),
    "community/humor_generation/humor_env.py": Case(
        judges={"Humor effectiveness": ("Score: 3\nScore: 2", "Score: 1\nScore: 0")}
    ),
    "community/goofy_math/goofy_math_server.py": Case(judges={"esponse A": ("It is \\boxed{A}", "It is \\boxed{B}")}),
    "community/cybersecurity_sigma/jaccard_reward_env.py": Case(right=f"<think>so</think> \\boxed{{{ROW['output']}}}"),
    "community/ufc_prediction_env/ufc_server.py": Case(
        right=found(r"blue corner:\n(?:Name: )?(.*?)(?: *\n|: \()", "<think>so</think> \\boxed{@}"),
        wrong=found(r"red corner, we have :\n(?:Name: )?(.*?)(?: *\n|: \()", "<think>so</think> \\boxed{@}"),
    ),
    "eval_environments/musr_eval.py": Case(
        {"narrative": "Two and two met.", "choices": "['4', '7']", "answer_index": 0}, splits=("murder_mysteries",)
    ),
    "eval_environments/mixeval_eval.py": Case(
        {"target": ["4"], "problem_type": "freeform", "benchmark_name": "sums"},
        config={"judge_base_url": OURS, "question_types": ["freeform"]},
        splits=("free_form",),
        judges={"[[": ("It is right. [[1]]", "It is wrong. [[0]]")},
    ),
    "eval_environments/boolq_eval.py": Case(
        {"passage": "Two and two are four.", "answer": "Yes"},
        other={"answer": "No"},
        right="<think>so</think> <answer>Yes</answer>",
    ),
    "eval_environments/pairwise_judgement_environment.py": Case(
        {"subset": "Math", "chosen": ["It is 4."], "rejected": ["It is 7."] * 3},
        right="<think>so</think> The better one is [[A]]",
        wrong="<think>so</think> The better one is [[B]]",
    ),
    "eval_environments/arena_hard_environment.py": Case(
        config={"judge_base_url": OURS},
        judges={"impartial judge": ("So it is: [[A>B]]", "So it is: [[A=B]]")},
    ),
    "eval_environments/refusalbench_environment.py": Case(
        config={"judge_base_url": OURS}, judges={"constitutes a": ("True", "False")}
    ),
    "community/solitaire_winning_probability/solitaire_server.py": Case(
        config={"max_token_length": 4096},
        right="<think>so</think> <formula>1/2</formula>",
        wrong=f"<think>so</think> <formula>1/3</formula> {'who knows whether it is so? ' * 400}",
    ),
    "community/punchline_vrcli/punchline_env.py": Case(
        {"title": "Why did 2 and 2 meet?", "selftext": "To make four of them.", "score": 100},
        models=("Qwen/Qwen3-1.7B-Base",),
        wrong="To make four of them.",
    ),
    "community/sql_query_env/sql_query_env.py": Case(
        files={
            **{f"wikisql/data/{split}.jsonl": [ASKED] * 64 for split in ("train", "dev", "test")},
            **{f"wikisql/data/{split}.tables.jsonl": [SUMS] for split in ("train", "dev", "test")},
            **{f"wikisql/data/{split}.db": "" for split in ("train", "dev", "test")},
        },
        right="<think>look for 2 in a</think> \\boxed{SELECT b FROM data WHERE a = '2'}",
        wrong="<think>look for 3 in a</think> \\boxed{SELECT b FROM data WHERE a = '3'}",
    ),
    "community/ufc_prediction_env/ufc_image_env.py": Case(
        files={
            f"environments/community/ufc_prediction_env/fighter_images/{name}.jpg": PIXEL
            for name in ("amanda-ribas", "rose-namajunas", "karl-williams", "justin-tafa")
        },
        right="A fight that nobody will forget for a long time. \\boxed{Blue}",
        wrong="A fight that nobody will forget for a long time. \\boxed{Red}",
    ),
    "community/pay_to_play/pay_to_play_env.py": Case(
        config={"testing_mode": True},
        files={
            "environments/community/pay_to_play/questions.json": {
                "training_questions": [QUESTION],
                "evaluation_questions": [QUESTION],
            },
            "environments/community/pay_to_play/secrets.json": {
                "agent": WALLET,
                "agent_cards": dict.fromkeys(
                    ("technical_expert", "communication_specialist", "creative_thinker"), WALLET
                ),
            },
        },
        judges={"Response to evaluate:": ("It is good. \\boxed{0.9}", "It is not. \\boxed{0.2}")},
    ),
    "swe_rl_env.py": Case(
        {"problem_statement": "The sum is wrong.", "text": "2 + 2 = 5", "patch": PATCH},
        right=f"<think>so</think>\n{PATCH}",
        wrong="<think>so</think>\nNo patch is wanted.",
    ),
    "intern_bootcamp/intern_bootcamp_env.py": Case(
        config={"task_name": "Game24bootcamp"},
        right=f"<think>{'one after the other, as they come. ' * 4}</think> \\boxed{{2 + 2}}",
        wrong=f"<think>{'one after the other, as they come. ' * 4}</think> I do not know.",
    ),
    "game_environments/textworld_env/textworld_env.py": Case(
        config={"max_steps": 3, "challenge_names": ["tw-simple"]}, right="go east", wrong="look"
    ),
    "community/cybersecurity_sigma/llm_judge_env.py": Case(
        judges={"rule": ("1.0", "0.0")}, right=f"<think>so</think> \\boxed{{{ROW['output']}}}"
    ),
    "verifiers_server.py": Case(
        config={"vf_env_name": "sums_for_verifiers"},
        files={"sums_for_verifiers.py": VERIFIERS},
    ),
    "smolagents_integration/smolagents_env.py": Case(
        files={
            "data/gaia/GAIA.py": "",
            "data/gaia/2023/validation/metadata.jsonl": [
                {"Question": "What is 2 + 2?", "Final answer": "4", "Level": 1, "task_id": str(at)} for at in range(16)
            ],
        },
        config={"process_timeout": 20},
        right="Thought: it is four.\n<code>\nfinal_answer('4')\n</code>",
        wrong="Thought: it is seven.\n<code>\nfinal_answer('7')\n</code>",
    ),
}

"""What environments and rewards read of a reply: of every family's tokens none that frames a conversation."""

from __future__ import annotations

import json

import numpy as np
import pytest

from atropos_core.rollouts.replies import THINKING, message_of, opening_of, searched, whole_reply
from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests.families import FAMILIES, write

ENDS = [(name, end) for name, family in FAMILIES.items() for end in family.ends]
ANALYSIS = "<|channel|>analysis<|message|>Seven and seven.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {name: ChatTokenizer(write(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


@pytest.mark.parametrize(("name", "end"), ENDS)
def test_a_reply_is_read_without_what_ends_it(tokenizers, name, end):
    tokenizer = tokenizers[name]
    pad = FAMILIES[name].config.get("pad_token", end)
    for message in (f"14{end}", f"14{end}{end}", f"14{end}{pad}{pad}"):
        assert tokenizer.parse(tokenizer.encode(message)) == {"role": "assistant", "content": "14"}
    assert tokenizer.decode(tokenizer.encode(f"14{end}"), keep_special=True) == f"14{end}"


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_the_middle_of_a_reply_are_not_read_either(tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    for marker in {*family.special, *family.ends} - {"<|message|>", "<|channel|>", "<|start|>", "<|constrain|>"}:
        assert tokenizer.parse(tokenizer.encode(f"1{marker}4"))["content"] == "14", marker


@pytest.mark.parametrize("name", FAMILIES)
def test_text_and_tokens_that_are_not_special_stay(tokenizers, name):
    tokenizer = tokenizers[name]
    message = "<eos? </S> [INST a<|b|>\n\n1 4 \n"
    assert tokenizer.parse(tokenizer.encode(message))["content"] == message


def test_reasoning_is_read_where_its_marks_are_tokens(tokenizers):
    for name in ("qwen", "deepseek"):
        read = tokenizers[name].parse(tokenizers[name].encode(f"<think>hm</think>14{FAMILIES[name].ends[0]}"))
        assert (read["reasoning_content"], read["content"]) == ("hm", "14")


def test_reasoning_marks_that_a_tokenizer_calls_special_are_read_all_the_same(tmp_path):
    directory = write("qwen", tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer(directory)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    read = tokenizer.parse(tokenizer.encode(f"<think>hm</think>{call}<|im_end|>"))
    assert (read["reasoning_content"], read["content"], len(read["tool_calls"])) == ("hm", "", 1)


def test_an_end_that_is_an_ordinary_word_is_taken_off_the_end_alone(tmp_path):
    """A base model that stops at a newline."""
    directory = write("unmarked", tmp_path)
    newline = int(ChatTokenizer(directory).encode("\n")[0])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": newline}))
    tokenizer = ChatTokenizer(directory)
    assert tokenizer.parse(tokenizer.encode("1\n4\n"))["content"] == "1\n4"


def test_a_reply_in_channels_is_an_answer_with_reasoning_and_calls(tokenizers):
    def parsed(text):
        return tokenizers["gpt-oss"].parse(tokenizers["gpt-oss"].encode(text))

    final = parsed(f"{ANALYSIS}<|channel|>final<|message|>14<|return|>")
    assert (final["content"], final["reasoning_content"]) == ("14", "Seven and seven.")
    assert whole_reply(final) == "<think>Seven and seven.</think>14"
    arguments = '{"a": {"b": 7}}<|call|>'
    last = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{arguments}"
    first = f" to=functions.add<|channel|>commentary<|message|>{arguments}"
    for text in (ANALYSIS + last, ANALYSIS + first):
        read = parsed(text)
        assert read["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": {"b": 7}}}}]
        assert (read["content"], read["reasoning_content"]) == ("", "Seven and seven.")
    assert parsed("<|channel|>final<|message|>14")["content"] == "14", "cut off by max_tokens"
    cut_off = parsed("<|channel|>analysis<|message|>Seven")
    assert (cut_off["content"], cut_off["reasoning_content"]) == ("", "Seven"), "cut off before it answered"
    assert parsed("14<|return|>")["content"] == "14"


@pytest.mark.parametrize("opened", ["<|channel|>analysis", "<|channel|>analysis<|message|>"])
def test_a_reply_to_a_prompt_that_ends_in_an_open_channel_begins_in_that_channel(tokenizers, opened):
    tokenizer = tokenizers["gpt-oss"]

    def parsed(text, opened):
        text = text if "<|message|>" in opened else f"<|message|>{text}"
        asked = tokenizer.render([{"role": "user", "content": "7+7?"}])
        return tokenizer.parse(tokenizer.encode(text), np.concatenate([asked, tokenizer.encode(opened)]))

    final = parsed("Seven, 13.<|end|><|start|>assistant<|channel|>final<|message|>14<|return|>", opened)
    assert (final["content"], final["reasoning_content"]) == ("14", "Seven, 13.")
    cut_off = parsed("That may be 14", opened)
    assert (cut_off["content"], cut_off["reasoning_content"]) == ("", "That may be 14")
    assert parsed("14<|return|>", opened.replace("analysis", "final"))["content"] == "14"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral"])
def test_the_end_that_the_policy_sampled_is_not_rendered_again(tokenizers, name):
    tokenizer = tokenizers[name]
    turn = {"gpt-oss": "<|end|>", "qwen": "<|im_end|>"}.get(name) or FAMILIES[name].ends[-1]
    messages = [{"role": "user", "content": "7+7"}]
    history = np.concatenate([tokenizer.render(messages), tokenizer.encode(f"14{turn}")])
    more = tokenizer.extend([{"role": "user", "content": "8+8"}], history)
    whole = tokenizer.decode(np.concatenate([history, more]), keep_special=True)
    after = whole[whole.rindex("14") :]
    assert after.count(turn) == (1 if name == "deepseek" else 2), "one ends the reply, the other the next question"


def tagged(*calls):
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


ADD = '{"name": "add", "arguments": {"a": 7}}'
READ_AS = {"type": "function", "function": {"name": "add", "arguments": {"a": 7}}}


@pytest.mark.parametrize("call", [ADD, '{"name": "add", "arguments": "{\\"a\\": 7}"}'])
def test_the_arguments_of_a_call_are_a_dict_also_where_a_model_writes_them_as_text(call):
    read = message_of(tagged(call))
    assert read == {"role": "assistant", "content": "", "tool_calls": [READ_AS], "text": tagged(call)}


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": 7}', '{"name": 1, "arguments": {}}', '{"arguments": {}}', "{}",
        '{"name": "add", "arguments": [7]}', '{"name": "add", "arguments": "seven"}', '{"name": "add", "arguments": "7"}',
        '{"name": "", "arguments": {}}', f'{{"name": "{"a" * 257}", "arguments": {{}}}}',
        '{"name": "add", "arguments": null}', '{"name": ["add"]}', '{"name": "add", "arguments": ' + "[" * 9999 + "}",
    ],
)  # fmt: skip
def test_a_call_without_a_name_or_with_arguments_that_are_no_object_stays_in_the_content(call):
    assert message_of(tagged(call)) == {"role": "assistant", "content": tagged(call)}
    beside = message_of(f"So: {tagged(ADD, call)}")
    assert (beside["content"], beside["tool_calls"]) == (f"So: {tagged(call)}", [READ_AS])


def test_calls_come_in_the_order_in_which_they_were_made_and_without_arguments_have_none():
    read = message_of(tagged(ADD, '{"name": "clock"}'))
    assert read["tool_calls"] == [READ_AS, {"type": "function", "function": {"name": "clock", "arguments": {}}}]


# -- reasoning


@pytest.mark.parametrize("open_tag", THINKING)
def test_reasoning_is_read_between_the_tags_of_each_family(open_tag):
    close = THINKING[open_tag]
    for text, content, reasoning in (
        (f"{open_tag}\nhm 3\n{close}\n\n4", "4", "hm 3"),
        (f"{open_tag}hm{close}4{open_tag}or 5{close}", "4", "hm\nor 5"),
        (f"So:{open_tag}hm{close}4", "So:\n4", "hm"),
        (f"{open_tag}\nhm, that might be 4", "", "hm, that might be 4"),
        (f"Well. {open_tag} that might be 4", "Well.", "that might be 4"),
    ):
        read = message_of(text, opening="")
        assert (read["content"], read["reasoning_content"]) == (content, reasoning), text
        assert whole_reply(read) == text


@pytest.mark.parametrize("open_tag", THINKING)
def test_a_reply_to_a_prompt_that_ends_in_an_open_tag_begins_as_reasoning(open_tag):
    close = THINKING[open_tag]
    assert opening_of(f"<|assistant|>{open_tag}\n") == open_tag
    assert opening_of(f"<|assistant|>{open_tag}\n\n{close}\n\n") == ""
    for text, content, reasoning in (
        (f"2 and 2 is 4\n{close}\n5", "5", "2 and 2 is 4"),
        ("2 and 2, that might be 4", "", "2 and 2, that might be 4"),
        (f"{open_tag}\n2 and 2\n{close}\n5", "5", "2 and 2"),
        (f"{close}\n5", "5", ""),
    ):
        read = message_of(text, open_tag)
        assert (read["content"], read["reasoning_content"]) == (content, reasoning), text
        assert whole_reply(read) == text
        assert whole_reply(read, opening=True) == open_tag + text


def test_a_closing_tag_that_nothing_opened_ends_reasoning_only_if_the_prompt_is_not_known():
    assert message_of("It is </think>.", "") == {"role": "assistant", "content": "It is </think>."}
    read = message_of("2 and 2\n</think>\n4")
    assert (read["content"], read["reasoning_content"]) == ("4", "2 and 2")


def test_tags_in_the_arguments_of_a_call_are_no_reasoning_and_calls_in_reasoning_are_no_calls():
    call = '{"name": "write", "arguments": {"text": "<think> </think>"}}'
    read = message_of(tagged(call))
    assert (read["content"], read["tool_calls"][0]["function"]["arguments"]) == ("", {"text": "<think> </think>"})
    assert "reasoning_content" not in read
    read = message_of(f"<think>{tagged(ADD)}</think>{tagged(call)}")
    assert [one["function"]["name"] for one in read["tool_calls"]] == ["write"]


def test_the_whole_reply_is_composed_if_only_its_parts_are_known():
    assert whole_reply({}) == ""
    assert whole_reply({"role": "assistant", "content": "4"}) == "4"
    message = {"role": "assistant", "content": "4", "reasoning_content": "hm", "tool_calls": [{"id": "1", **READ_AS}]}
    assert whole_reply(message) == f"<think>\nhm\n</think>\n4\n<tool_call>\n{ADD}\n</tool_call>"
    assert message_of(whole_reply(message))["tool_calls"] == [READ_AS]


@pytest.mark.parametrize("name", ["qwen", "deepseek"])
def test_a_tokenizer_reads_a_reply_by_the_prompt_that_it_continues(tokenizers, name):
    tokenizer, end = tokenizers[name], FAMILIES[name].ends[0]
    prompt = np.concatenate([tokenizer.render([{"role": "user", "content": "2+2?"}]), tokenizer.encode("<think>\n")])
    read = tokenizer.parse(tokenizer.encode(f"2 and 2 is 4\n</think>\n5{end}"), prompt)
    assert (read["content"], read["reasoning_content"]) == ("5", "2 and 2 is 4")
    assert whole_reply(read) == "2 and 2 is 4\n</think>\n5"
    assert tokenizer.parse(tokenizer.encode("that might be 4"), prompt)["content"] == ""
    assert tokenizer.parse(tokenizer.encode("that might be 4"), prompt[:-3])["content"] == "that might be 4"


def test_thinking_tags_that_are_special_tokens_are_part_of_the_text(tmp_path):
    directory = write("qwen", tmp_path, ("[THINK]", "[/THINK]"))
    tokenizer = ChatTokenizer(directory)
    read = tokenizer.parse(tokenizer.encode("[THINK]hm[/THINK]14<|im_end|>"))
    assert (read["content"], read["reasoning_content"]) == ("14", "hm")
    said = tokenizer.render([{"role": "user", "content": "[THINK]"}])
    assert tokenizer.encode("[THINK]")[0] not in said, "in a message it is text"


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        (r"</think>\s*(.+)", True), (r"<\/think>", True), ("</?think>", True), (r"\[/THINK\](.*)", True),
        (r"(?i)</THINK>\s*(.+)", True), (r"<(think|reason)>", True), (r"<(?:reason|think)>", True), (r"<[/]think>", True),
        (r"<\s*think\s*>", True), (r"<\|inner_prefix\|>", True), (r"(think|guess) \d", False),
        (r"I think (\d+)", False), ("<answer>", False), ("<tool_call>", False),
    ],
)  # fmt: skip
def test_a_pattern_is_searched_in_the_reasoning_only_if_it_names_a_thinking_tag(pattern, whole):
    text = f"hm</think>So: {tagged(ADD)} 4"
    assert searched(message_of(text, "<think>"), pattern) == (
        f"<think>{text}" if whole else text.removeprefix("hm</think>")
    )
    assert searched({"content": "4", "reasoning_content": "hm"}, pattern) == (
        "<think>\nhm\n</think>\n4" if whole else "4"
    )
    assert searched(message_of(" 4 "), pattern) == " 4 "

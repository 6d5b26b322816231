"""An agent on OpenAI's SDK, and its reward. It prints the tokens that it received, with their logprobs."""

import json

from openai import OpenAI


def main(task):
    client = OpenAI()
    messages, received = list(task["messages"]), []
    for question in (None, "Say it again."):
        if question:
            messages.append({"role": "user", "content": question})
        choice = client.chat.completions.create(model="policy", messages=messages, logprobs=True).choices[0]
        messages.append({"role": "assistant", "content": choice.message.content})
        received.append([[bytes(one.bytes).decode(), one.logprob] for one in choice.logprobs.content])
    print(json.dumps(received))


def vowels(case):
    text = "".join(message["content"] for message in case.messages if message["role"] == "assistant")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)

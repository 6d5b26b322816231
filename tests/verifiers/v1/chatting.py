"""A harness that talks in its own process: every call goes to the address that it is handed, with the key that it is handed."""

import contextlib
import json

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import mcp_client
from verifiers.v1.runtimes import ProgramResult


class ChatConfig(vf.HarnessConfig):
    most_calls: int = 3


class ChatHarness(vf.Harness[ChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt]
        async with contextlib.AsyncExitStack() as stack:
            # `timeout`: of its own, the client gives a connection 5 s, in which a process on a busy machine may get no CPU
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=300)
            )
            owners, tools = {}, []
            for url in mcp_urls.values():
                server = await stack.enter_async_context(mcp_client({"url": url}))
                for tool in (await server.list_tools()).tools:
                    owners[tool.name] = server
                    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": function})
            for _ in range(self.config.most_calls):
                given = {"tools": tools} if tools else {}
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": await called(owners, call)})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def called(owners, call):
    if call.function.name not in owners:
        return f"error: there is no tool {call.function.name}"
    try:
        found = await owners[call.function.name].call_tool(call.function.name, json.loads(call.function.arguments))
    except Exception as error:
        return f"error: {error}"
    return "".join(part.text for part in found.content)


__all__ = ["ChatHarness"]

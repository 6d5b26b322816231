"""Every server that an environment file configures, as the run's policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict

from atropos_core.errors import ConfigError, DataError
from atropos_env_atroposlib.standins.answers import Answer, chat_answer, text_answer
from atropos_env_atroposlib.standins.link import Reply, link

UNKNOWN = (  # arguments that the policy ignores; any other unknown argument is refused
    "model extra_body stream timeout user seed logprobs top_logprobs tool_choice parallel_tool_calls response_format split "
    "frequency_penalty presence_penalty repetition_penalty skip_special_tokens include_stop_str_in_output "
    "reasoning_effort extra_headers metadata store add_generation_prompt echo best_of"
).split()


class ServerBaseline(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    timeout: int = 1200
    num_max_requests_at_once: int = 512
    num_requests_for_eval: int = 64
    model_name: str = "default"
    rolling_buffer_length: int = 1000
    server_type: str = "openai"
    tokenizer_name: str = "none"


class APIServerConfig(ServerBaseline):
    api_key: str | None = ""
    base_url: str | None = ""
    n_kwarg_is_ignored: bool = False
    health_check: bool = True


OpenaiConfig = APIServerConfig


class ReasoningConfig(BaseModel):
    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None


class ServerManagerConfig(BaseModel):
    slurm: bool = False
    testing: bool = False
    max_n_completions: int = 8
    proxy_url: str | None = None


class APIServer:
    """One server, like `self.server.servers[i]`."""

    server_healthy = True

    def __init__(self, config: ServerBaseline, **ignored: Any) -> None:
        self.config = config

    @property
    def tokenizer(self) -> Any:
        return link().tokenizer

    async def chat_completion(self, messages: Sequence[Mapping[str, Any]] = (), **given: Any) -> Answer:
        tools = given.pop("tools", None)
        text = rendered(messages, tools)
        replies = await sampled(link().ids(text, special=False), text, given)
        return chat_answer(replies, self.config.model_name, tools=bool(tools))

    async def completion(self, prompt: str | Sequence[int] = "", **given: Any) -> Answer:
        replies = await self._continue(prompt, given)
        return text_answer(replies, self.config.model_name)

    async def tokens_and_logprobs_completion(
        self, prompt: str | Sequence[int] = "", input_ids: Sequence[int] | None = None, **given: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Prompt ids; ids, logprobs and finish of each continuation."""
        if "messages" in given:
            prompt = rendered(given.pop("messages"), given.pop("tools", None))
        replies = await self._continue(prompt if input_ids is None else input_ids, given)
        return (
            replies[0].prompt if replies else [],
            [one.tokens for one in replies],
            [one.logprobs for one in replies],
            [one.finish for one in replies],
        )

    async def get_logprobs(self, **given: Any) -> dict[str, Any]:
        raise ConfigError(
            "the environment asked for the logprobs of given tokens, but a run's policy only samples.",
            remedy="For a teacher's logprobs, set [teacher.NAME] in the run file.",
        )

    async def wandb_metrics(self, metrics: dict[str, Any] | None, server_name: str = "") -> dict[str, Any]:
        return metrics or {}

    async def update_weight(self, weight: float) -> None:
        """Does nothing: requests are not distributed here, since all go to the policy."""

    async def close(self) -> None: ...

    async def _continue(self, prompt: str | Sequence[int], given: dict[str, Any]) -> list[Reply]:
        if isinstance(prompt, str):
            return await sampled(link().ids(prompt, special=True), prompt, given)
        text = link().tokenizer.decode(list(prompt), skip_special_tokens=False)
        return await sampled(list(prompt), text, given)


OpenAIServer = VLLMServer = SGLangServer = TrlVllmServer = APIServer


class ServerManager(APIServer):
    """`self.server`: as many servers as the file configured, each of which is the policy."""

    def __init__(self, configs: Any = None, slurm: bool = False, testing: bool = False, **ignored: Any) -> None:
        given = configs if isinstance(configs, list) else [configs or APIServerConfig()]
        super().__init__(given[0] if given else APIServerConfig())
        made = ignored.get("server_class")
        kind = made if isinstance(made, type) and issubclass(made, APIServer) else APIServer
        self.servers = [kind(one) for one in given]

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        yield self.servers[0]

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **ignored: Any) -> AsyncIterator[Any]:
        from atropos_env_atroposlib.standins.managed import ManagedServer

        yield ManagedServer(self.servers[0], tokenizer)


def rendered(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """The prompt's text, by the policy's chat template. Raises MessageDropped if the template leaves out a message or the tools."""
    said = [{key: value for key, value in dict(one).items() if value is not None} for one in messages]
    for one in said:
        one.setdefault("content", "")
        if "tool_calls" in one:
            one["tool_calls"] = [
                dict(call) if isinstance(call, Mapping) else call.model_dump() for call in one["tool_calls"]
            ]
    goes_on = not said or said[-1].get("role") != "assistant"

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        more = {"tools": list(tools)} if tools else {}
        text: str = link().tokenizer.apply_chat_template(
            [dict(one) for one in messages], tokenize=False, add_generation_prompt=goes_on, **more
        )
        return text

    def other(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return render(messages, tools)
        except Exception as error:  # templates are code of the model's author
            raise DataError(f"the chat template refuses these messages: {error}") from error

    text = render(said, tools or ())
    link().messages.check(said, tools or (), text, other, (goes_on,))
    return text


async def sampled(ids: Sequence[int], text: str, given: dict[str, Any]) -> list[Reply]:
    """Sample from the policy. Raises ConfigError for an unknown argument."""
    given = dict(given)
    n = int(given.pop("n", None) or 1)
    stop = given.pop("stop", None) or []
    most = given.pop("max_tokens", None) or given.pop("max_completion_tokens", None)
    settings = {"max_tokens": int(most)} if most is not None and int(most) > 0 else {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if (value := given.pop(name, None)) is not None:
            settings[name] = value
    if odd := sorted(given.keys() - set(UNKNOWN) - {"max_completion_tokens"}):
        raise ConfigError(f"the environment samples with {odd[0]!r}, which is not supported here.")
    ends = [stop] if isinstance(stop, str | int) else stop
    decode = link().tokenizer.decode
    return await link().replies(
        ids, text, n, settings, [decode([one]) if isinstance(one, int) else one for one in ends]
    )

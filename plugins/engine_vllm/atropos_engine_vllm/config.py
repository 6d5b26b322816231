"""The options of `[engine] use = "vllm"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from atropos_core.plugins.options import Options

_OURS = (  # flags that the engine sets itself: it relies on them, or has an option for them
    "--model",
    "--seed",
    "-tp",
    "-pp",
    "-dp",
    "--pipeline-parallel-size",
    "--enable-chunked-prefill",
    "--no-enable-chunked-prefill",
    "--worker-extension-cls",
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--middleware",
    "--worker-cls",
    "--enable-sleep-mode",
    "--enable-cumem-allocator",
    "--logprobs-mode",
    "--enable-scale-out",
    "--generation-config",
    "--weight-transfer-config",
    "--enable-lora",
    "--max-loras",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--dtype",
    "--enforce-eager",
    "--max-model-len",
    "--max-num-seqs",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--tensor-parallel-size",
    "--data-parallel-size",
    "--api-server-count",
    "--enable-return-routed-experts",
    "--speculative-config",
    "-sc",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
)


class VLLMOptions(Options):
    """Options of the engine "vllm". Devices and threads are the run's: `engine.devices`, `engine.threads`."""

    url: str | None = Field(
        None,
        description="address of a running server, such as http://host:port; the engine then starts and ends nothing. Its key,"
        " if it has one, is read from the environment variable VLLM_API_KEY",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description='precision of the weights; "auto" is float32 on a CPU and the checkpoint\'s own elsewhere'
    )
    enforce_eager: bool | None = Field(
        None,
        description="disable torch.compile and CUDA graphs; the default on a CPU, because it halves the start-up time there",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and reply together; default: the model's own"
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences that are decoded together; more wait")
    memory_share: float = Field(0.5, gt=0, le=1, description="of the GPU's memory, for weights and keys and values")
    kv_cache_gb: float = Field(1.0, gt=0, description="gigabytes (10⁹ bytes) for keys and values on a CPU")
    enable_sleep_mode: bool = Field(
        False,
        description="in an on-policy run, free the memory of keys and values during each update",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="until the server answers, including loading and compiling")
    prefix_caching: bool = Field(
        True,
        description="compute a prompt that several requests share once; on a CPU not for models with states (Mamba), for which vLLM cannot",
    )
    max_loras: int = Field(
        4,
        ge=2,
        description="different adapters in one batch: versions of a trainer's, or named adapters of clients; more wait",
    )
    max_cpu_loras: int | None = Field(
        None,
        ge=2,
        description="adapters that the server keeps in memory; default: 16, or four times `--adapters` of `atropos tinker`",
    )
    max_lora_rank: int = Field(
        32,
        ge=1,
        le=512,
        description="largest rank of named adapters; vLLM reserves memory for max_loras of this rank. A trainer's own adapter has"
        " its own rank",
    )

    def lora_slots(self, named: int = 0) -> int:
        """Adapters that the server keeps in memory. Without named ones: enough to publish a version without waiting for old ones
        to drain."""
        return self.max_cpu_loras or max(4 * named or 16, self.max_loras)

    speculation: Literal["ngram"] | None = Field(
        None,
        description="propose tokens that followed the same tokens earlier in the request, and check several in one step; what is"
        " sampled has the same distribution. Faster if replies repeat their prompt",
    )
    speculative_tokens: int = Field(4, ge=1, le=128, description="tokens that are proposed at once, with `speculation`")
    prompt_lookup_min: int = Field(
        2, ge=1, description="fewest last tokens that must occur earlier, with `speculation`"
    )
    prompt_lookup_max: int = Field(
        4, ge=1, description="most last tokens that are looked for earlier, with `speculation`"
    )
    extra_args: list[str] = Field([], description='more flags of `vllm serve`, such as ["--block-size", "32"]')

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must be the server's address, such as http://127.0.0.1:8000")
        return url.rstrip("/") if url else url

    @model_validator(mode="after")
    def _check_flags(self) -> VLLMOptions:
        flags = [argument.split("=")[0].replace("_", "-") for argument in self.extra_args]
        ours = {flag for flag in flags if flag in _OURS}
        # vLLM accepts the beginning of a flag for the whole; "--m" may still mean another one.
        ours |= {flag for flag in flags if flag.startswith("--") and any(one.startswith(flag) for one in _OURS)}
        if taken := sorted(ours):
            raise ValueError(f"extra_args: {', '.join(taken)} is set by the engine: use its options")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> VLLMOptions:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras = {self.max_cpu_loras} is less than max_loras = {self.max_loras}: those of a batch are in memory too"
            )
        return self

    @model_validator(mode="after")
    def _check_speculation(self) -> VLLMOptions:
        names = ("speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        self.refuse_idle(self.speculation is not None, 'without speculation = "ngram"', *names)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} is more than prompt_lookup_max = {self.prompt_lookup_max}: lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_attached_server(self) -> VLLMOptions:
        if self.url is not None:
            fields = type(self).model_fields
            given = [name for name, field in fields.items() if getattr(self, name) != field.default]
            if idle := [name for name in given if name not in ("url", "start_timeout_s")]:
                raise ValueError(
                    f"{', '.join(idle)} apply only to a server that the engine starts, but the one at {self.url} already runs:"
                    " set them there"
                )
        return self

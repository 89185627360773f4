"""The tables about a model: its tokens, its engines, and what is sampled from them.

Owns these keys, their defaults and checks. Never reads a value from anywhere. Invariant: a
parameter that the tables take has one meaning in both protocols.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rollstream.parameters import PARAMETERS, problem_of
from rollstream.settings.table import Table
from rollstream.urls import NO_NAME_WITH_TLS, is_name_with_tls


class ModelTable(Table):
    """Tokens: which vocabulary, which chat format, how much context."""

    tokenizer: str = ""
    """A `tokenizer.json`, the folder that holds one, or a hub id `org/name[@revision]`. A path that
    exists wins; only for a hub id that the local cache lacks is the hub asked."""
    renderer: str = "auto"
    """The family of the chat format (docs/tokens.md), `template` for the chat template in the
    tokenizer's folder, or `auto` for a model whose exact hub id is known."""
    chat_template: str = ""
    """With `template`: path of another chat template than the folder's."""
    boundaries: str = "auto"
    """With `template`: how a turn ends, a row of the table in docs/tokens.md, or `derived`."""
    tool_parser: str = ""
    """With `template`: how calls are spelled; empty leaves them text."""
    reasoning_parser: str = ""
    """With `template`: `think`, `none`, or empty for the vocabulary's own markers."""
    template_date: str = ""
    """With `template`: what today is, as YYYY-MM-DD, for the whole run."""
    template_names: dict[str, Any] = Field(default_factory=dict)
    """With `template`: what else the template reads, as `{"enable_thinking": false}`."""
    max_context_tokens: int = Field(32768, ge=1)
    """What the engine's model takes, prompt and response together."""


class EngineTable(Table):
    """The inference engines."""

    kind: Literal["sglang", "vllm", "hf", "sim"] = "sglang"
    """The protocol that the engines speak. The engine over transformers and the simulated one speak
    SGLang's, so `hf` and `sim` do the same as `sglang`, and say what the engines are."""
    urls: tuple[str, ...] = ()
    """Root URLs of the engines. `dns+http://host:port` is every address that the name has, and
    `router+http://host:port` every worker that a router lists; both are asked again and again.
    `dns+https` is refused: engines are called by address, which no certificate names. A trainer's
    `set_engines` wins over this."""
    discover_interval_s: float = Field(10.0, gt=0)
    """How often a name is resolved, and a router asked for its workers."""
    require_version: bool = True
    """An engine that is known to have older weights than the run, or to be between two, takes no
    calls. Engines that never name their weights are believed to have the run's."""
    vllm_route: Literal["generate", "completions"] = "generate"
    """With `vllm`: token-in token-out (`/inference/v1/generate`), or `/v1/completions` for servers
    that lack it."""
    model: str = ""
    """With `vllm`: the model's name in every request; empty sends none."""
    lora_path: str = ""
    """With SGLang: the adapter of every request; empty sends none."""
    max_in_flight: int = Field(0, ge=0)
    """The most calls that this worker has at one engine; 0 is as many as it has slots. Engines that
    say that they are full get less, and more again as they answer."""
    retry_budget: float = Field(0.2, ge=0, le=1)
    """Retries may be this share of the calls, over a minute, ten whatever it is; beyond it a call
    fails at once."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long one request may take."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """How long one connection attempt may take."""
    max_retries: int = Field(4, ge=0)
    """How often one call is tried again, elsewhere where there is another engine."""
    retry_backoff_s: float = Field(0.2, gt=0)
    """First wait before a retry; doubles with jitter up to `retry_backoff_max_s`."""
    retry_backoff_max_s: float = Field(5.0, gt=0)
    """The longest wait between two tries."""
    abort_wait_s: float = Field(2.0, ge=0)
    """How long the partial reply of a call that was aborted is waited for: before a retry, and at
    an update that stops calls."""
    probe_interval_s: float = Field(2.0, gt=0)
    """How often an engine is asked whether it is there."""
    routed_experts: bool = False
    """Ask for the experts that every token was routed to (R3) and deliver them with the sample; the
    server needs --enable-return-routed-experts."""
    indexer_topk: bool = False
    """Ask for the indexer's choice too (sparse attention); --enable-return-indexer-topk."""
    replay_layers: int = Field(0, ge=0)
    """Layers of a row of routed experts; 0 reads the config.json beside the tokenizer."""
    replay_top_k: int = Field(0, ge=0)
    """Experts of a token in a layer; 0 reads the config.json beside the tokenizer."""

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple):
            return value
        urls = [url.strip().rstrip("/") if isinstance(url, str) else url for url in value]
        for url in urls:
            if isinstance(url, str) and is_name_with_tls(url):
                raise ValueError(NO_NAME_WITH_TLS)
            plain = url.removeprefix("dns+").removeprefix("router+") if isinstance(url, str) else ""
            if plain and not plain.startswith(("http://", "https://")):
                raise ValueError(
                    "URLs that start with http:// or https://, or with dns+ or router+ before that"
                )
        return tuple(url for url in urls if url)


class SamplingTable(Table):
    """The distribution that the engines sample from."""

    temperature: float = Field(1.0, ge=0)
    """Of training samples; a row or an environment may have its own."""
    max_new_tokens: int = Field(1024, ge=1)
    """Cap of one reply (the per-turn cap)."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Cap of everything after the first prompt, sampled or observed."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the log-probs are not those of the sampled distribution."""
    top_k: int = -1
    """-1 is all; anything else needs `allow_off_distribution`."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above 0 needs `allow_off_distribution`."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a reply, beside the chat format's own."""
    allow_off_distribution: bool = False
    """Permit parameters under which log-probs no longer are those of the sampled distribution."""

    @field_validator("top_k", "stop", "stop_token_ids")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        if problem_of(info.field_name or "", value):
            raise ValueError(PARAMETERS[info.field_name or ""].expected)
        return value

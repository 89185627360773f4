"""OpenAI's chat completions: a request read, a reply written, as JSON and as a stream.

Owns the words of this API. Never renders, never calls an engine, does no I/O. Invariant: a stream's
deltas, put together, are the message of the reply without stream, and what the model sampled is
told whole or not at all.

What a stream sends: the role; reasoning, content and calls as they come; the log-probs of every
sampled token, where they were asked for, in chunks of their own with an empty delta; the finish;
the usage, where it was asked for (no choices); `[DONE]`. Log-probs come last because a token is
judged before it is told: a marker or a call has no text of its own in the content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollstream.sample import LogProbs, Message

from ..types import CallRule, ChatReply, ChatRequest, Delta, ErrorKind, Event, Refusal
from . import rules
from .openai_messages import read_messages

ID_PREFIX = "chatcmpl-"
FINGERPRINT = "fp_rollstream"
"""The same for all replies: which weights sampled one is in the sample, not in the reply."""
LOGPROBS_A_CHUNK = 256
"""Tokens whose log-probs share one chunk of a stream: no event is larger than some 30 kB."""

FIELDS: rules.Table = {
    **rules.EVERYWHERE,
    **rules.used("messages tools tool_choice parallel_tool_calls stream stream_options logprobs"),
    **rules.used("model", "goes into the reply as it came; the run has one model"),
    **rules.lowered("max_completion_tokens", "the newer name: it wins where both are given"),
    **rules.lowered("max_tokens"),
    **rules.refused(
        "functions function_call", "they are no more: use tools and tool_choice"
    ),
    **rules.refused(
        "modalities", "replies are text", lambda value: value == ["text"], '["text"]'
    ),
    **rules.refused("audio web_search_options", "replies are the model's own text; leave it out"),
    **rules.refused("moderation", "nothing is moderated here; leave it out"),
    **rules.no_effect(
        "metadata store user safety_identifier service_tier prompt_cache_key "
        "prompt_cache_options prompt_cache_retention priority rid request_id cache_salt",
        "nothing is stored, charged or cached by it",
    ),
}  # fmt: skip
"""Every field of a request that is known, and what becomes of it."""

_ERRORS: dict[ErrorKind, tuple[str, str]] = {
    ErrorKind.INVALID: ("invalid_request_error", "invalid_value"),
    ErrorKind.TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    ErrorKind.NOT_FOUND: ("invalid_request_error", "not_found"),
    ErrorKind.CONFLICT: ("invalid_request_error", "conflict"),
    ErrorKind.GONE: ("invalid_request_error", "session_closed"),
    ErrorKind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    ErrorKind.BUSY: ("requests", "rate_limit_exceeded"),
    ErrorKind.ENGINE: ("server_error", "engine_unavailable"),
    ErrorKind.INTERNAL: ("server_error", "internal_error"),
}
"""Kind → (type, code). SDKs choose their exception by the status, litellm by the code too."""


class OpenAIChat:
    """The dialect of `POST …/chat/completions`."""

    name = "openai_chat"
    paths: tuple[str, ...] = ("chat/completions",)
    cannot_carry: Mapping[str, str] = {
        "images, audio, files": "refused, with the index of the message",
        "custom tools": "refused: only functions",
        "`strict` of a tool": "shown to the model as given, not enforced (named as pinned)",
        "`refusal` parts and messages": "are text of the assistant",
        "other fields of a message": "dropped: no template reads them",
        "log-probs of a stream": "in chunks of their own before the finish, not beside the text",
        "tokens other than the sampled ones": "`top_logprobs` is always empty",
    }

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """Translate a request.

        Raises:
            Refusal: says which field, and what to do.
        """
        fields = rules.sort_fields(body, FIELDS)
        tools, strict = rules.function_tools(body.get("tools"))
        stream = rules.switch(body, "stream", default=False)
        parallel = rules.switch(body, "parallel_tool_calls", default=True)
        retry, retry_key = rules.retry_of(headers)
        return ChatRequest(
            messages=read_messages(body.get("messages")),
            tools=tools,
            model=rules.text(body, "model"),
            max_tokens=rules.cap(body, "max_completion_tokens", "max_tokens"),
            call_rule=_call_rule(body.get("tool_choice")),
            max_calls=None if parallel else 1,
            stream=stream,
            log_probs=rules.switch(body, "logprobs", default=False),
            retry=retry,
            retry_key=retry_key,
            pinned=(*fields.pinned, "strict") if strict else fields.pinned,
            ignored=fields.ignored,
            extra={"include_usage": stream and _wants_usage(body.get("stream_options"))},
        )

    def reply(self, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
        """Return a `chat.completion`."""
        log_probs = None
        if request.log_probs:
            content = list(sampled_log_probs(reply.pieces, reply.log_probs))
            log_probs = {"content": content, "refusal": None}
        return {
            "id": ID_PREFIX + reply.id,
            "object": "chat.completion",
            "created": int(reply.created_unix_s),
            "model": request.model,
            "choices": [
                {
                    "index": 0,
                    "message": _message(reply.message),
                    "logprobs": log_probs,
                    "finish_reason": reply.finish,
                }
            ],
            "usage": _usage(reply),
            "system_fingerprint": FINGERPRINT,
        }

    def streamer(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> ChatStreamer:
        """Return a writer of one stream."""
        return ChatStreamer(request, reply_id, created_unix_s)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error."""
        kind, code = _ERRORS[refusal.kind]
        return {
            "error": {
                "message": refusal.message,
                "type": kind,
                "param": refusal.param or None,
                "code": code,
            }
        }


class ChatStreamer:
    """Writes one reply as `chat.completion.chunk`s."""

    def __init__(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> None:
        self._with_usage = bool(request.extra.get("include_usage"))
        self._with_log_probs = request.log_probs
        self._head = {
            "id": ID_PREFIX + reply_id,
            "object": "chat.completion.chunk",
            "created": int(created_unix_s),
            "model": request.model,
            "system_fingerprint": FINGERPRINT,
        }

    def begin(self) -> list[Event]:
        """Return the chunk that says the role."""
        return [self._chunk({"role": "assistant", "content": None, "refusal": None})]

    def delta(self, delta: Delta) -> list[Event]:
        """Return a piece of the reply."""
        return [self._chunk(delta)]

    def end(self, reply: ChatReply) -> list[Event]:
        """Return log-probs, finish, usage and `[DONE]`."""
        events = []
        if _message(reply.message)["content"] == "":
            # No content came: it is "" in the reply without stream, and null only beside calls.
            events.append(self._chunk({"content": ""}))
        if self._with_log_probs:
            entries = list(sampled_log_probs(reply.pieces, reply.log_probs))
            events += [
                self._chunk({}, log_probs=entries[at : at + LOGPROBS_A_CHUNK])
                for at in range(0, len(entries), LOGPROBS_A_CHUNK)
            ]
        events.append(self._chunk({}, finish=reply.finish))
        if self._with_usage:
            events.append(("", {**self._head, "choices": [], "usage": _usage(reply)}))
        return [*events, ("", "[DONE]")]

    def error(self, refusal: Refusal) -> list[Event]:
        """Return the error as data; no `[DONE]` follows, so that nobody takes it for a reply."""
        return [("", OpenAIChat().error(refusal))]

    def ping(self) -> Event | None:
        """Return None: comment lines are what SDKs of this API skip."""
        return None

    def _chunk(
        self,
        delta: Delta,
        *,
        finish: str | None = None,
        log_probs: list[dict[str, Any]] | None = None,
    ) -> Event:
        told = None if log_probs is None else {"content": log_probs, "refusal": None}
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return "", chunk


def _call_rule(choice: Any) -> CallRule:
    if choice is None or choice == "auto":
        return CallRule.AUTO
    if choice == "none":
        return CallRule.NONE
    shown = choice.get("type", "?") if isinstance(choice, dict) else choice
    raise rules.forced_choice(f"{shown!r:.60}")


def _wants_usage(options: Any) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise Refusal(
            ErrorKind.INVALID,
            'stream_options: an object, such as {"include_usage": true}',
            param="stream_options",
        )
    return rules.switch(options, "include_usage", default=False)


def _message(stored: Message) -> Message:
    """Return a stored message as this API says it: content is null only beside calls."""
    calls = stored.get("tool_calls") or []
    message: Message = {
        "role": "assistant",
        "content": stored.get("content") or (None if calls else ""),
        "refusal": None,
    }
    if stored.get("reasoning_content"):
        message["reasoning_content"] = stored["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message


def _usage(reply: ChatReply) -> dict[str, Any]:
    sampled = len(reply.ids)
    known = {} if reply.num_reasoning is None else {"reasoning_tokens": reply.num_reasoning}
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": sampled,
        "total_tokens": reply.num_prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached, "audio_tokens": 0},
        "completion_tokens_details": {
            **known,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def sampled_log_probs(pieces: Sequence[str], log_probs: LogProbs) -> Iterator[dict[str, Any]]:
    """Yield an entry for every sampled id, so that ids stay countable.

    Half a character has bytes but no text of its own: its token is U+FFFD.
    """
    for piece, log_prob in zip(pieces, log_probs.tolist(), strict=True):
        raw = piece.encode("utf-8", "surrogateescape")
        yield {
            "token": raw.decode("utf-8", "replace"),
            "logprob": log_prob,
            "bytes": list(raw),
            "top_logprobs": [],
        }

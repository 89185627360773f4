"""OpenAI's Responses API: `responses`, whole and as a stream.

Owns the rule of every parameter, the reply as output items, the events of a stream. Never holds a
session, never renders; what a client sends as `input` is read in `responses_input`. Invariant: the
response that ends a stream is the one without stream, its items are those that were streamed, and
the echo of its items, or of its id, is the stored message.

**Instructions and `previous_response_id`.** The API gives every response the instructions of its
own request alone. Here a conversation is append-only: what the model saw cannot be taken out again.
So the first request's instructions are its system message; a later request's are added only where
they are others than those in force, as a system message behind what stands there; and without any
the ones in force stay. Which are in force is in the response's id (a digest behind the reply's id),
so nothing has to be kept for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.sample import Message

from ..types import CallRule, ChatReply, ChatRequest, ErrorKind, Refusal, Streamer
from . import rules
from .openai_chat import OpenAIChat
from .responses_input import read_input
from .responses_output import ID_PREFIX, ResponseStream, ended_response, output_items

_MARK_CHARS = 12
_LOG_PROBS = "message.output_text.logprobs"

FIELDS: rules.Table = {
    **rules.EVERYWHERE,
    **rules.used(
        "model input instructions previous_response_id tools tool_choice parallel_tool_calls text "
        "include stream metadata"
    ),
    **rules.lowered("max_output_tokens"),
    **rules.pinned("reasoning", "the run's chat format says how much"),
    **rules.pinned(
        "truncation context_management", "conversations are append-only: nothing is cut out"
    ),
    **rules.refused(
        "background", "a response is given to who asked for it; ask again", rules.is_off, "false"
    ),
    **rules.refused(
        "conversation", "the session is the conversation: use previous_response_id, or send all"
    ),
    **rules.refused("prompt", "there are no stored prompts; send instructions and input"),
    **rules.refused("moderation", "nothing is moderated here; leave it out"),
    **rules.no_effect("store", "responses live as long as their session"),
    **rules.no_effect("max_tool_calls", "counts OpenAI's own tools, and there are none"),
    **rules.no_effect(
        "user safety_identifier service_tier prompt_cache_key prompt_cache_options "
        "prompt_cache_retention stream_options background_options access_programs image"
    ),
}

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "tools")
"""What a response says again of its request."""


class OpenAIResponses:
    """The dialect of `client.responses` and of the `openai-agents` SDK."""

    name = "openai_responses"
    paths: tuple[str, ...] = ("responses",)
    cannot_carry: Mapping[str, str] = {
        "images, files, item references, items of OpenAI's own tools": "400, with the item's index",
        "OpenAI's own tools (web search, code, MCP, …), custom tools": "400: only functions",
        "`tool_choice` `required`, a named or an allowed tool, `text.format`": (
            "400: sampling is never forced"
        ),
        "`background`, `conversation`, `prompt`": "400",
        "other `instructions` behind `previous_response_id`": (
            "added behind the conversation; the earlier ones stay"
        ),
        "`truncation`, `context_management`": "pinned: nothing is cut out of a conversation",
        "`reasoning`, `text.verbosity`, `temperature`, `top_p`": "pinned: the run's own",
        "`encrypted_content`, a summary of reasoning": (
            "reasoning is told whole, as `content`; a summary that comes back counts only where "
            "there is no content"
        ),
        "`store`, `GET …/responses/ID`": "a response can be gone on from as long as its session is"
        " open, and not read again",
        "`reasoning_tokens`": "0 where a format does not tell them apart (gpt-oss)",
        "a call between two pieces of text": "calls stand behind the text",
    }

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """Translate a request; see `Dialect`.

        Raises:
            Refusal: says which field, and what to do.
        """
        fields = rules.sort_fields(body, FIELDS)
        tools, strict = rules.function_tools(body.get("tools"))
        rule, parallel = _call_rule(body), rules.switch(body, "parallel_tool_calls", default=True)
        retry, retry_key = rules.retry_of(headers)
        continues, mark = _previous(rules.text(body, "previous_response_id"))
        instructions = rules.text(body, "instructions")
        messages = read_input(body.get("input"))
        if instructions:
            messages = _instructed(messages, instructions, in_force=mark if continues else "")
            mark = _mark(instructions)
        return ChatRequest(
            messages=messages,
            tools=tools,
            model=rules.text(body, "model"),
            max_tokens=rules.cap(body, "max_output_tokens"),
            call_rule=rule,
            max_calls=None if parallel else 1,
            stream=rules.switch(body, "stream", default=False),
            log_probs=_LOG_PROBS in _include(body.get("include")),
            continues=continues,
            retry=retry,
            retry_key=retry_key,
            pinned=(
                *fields.pinned,
                *_pinned_text(body.get("text")),
                *(("tools.strict",) if strict else ()),
            ),
            ignored=fields.ignored,
            extra={"asked": {name: body.get(name) for name in _ECHOED}, "mark": mark},
        )

    def reply(self, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
        """Return a `response`."""
        return ended_response(
            request, reply, list(output_items(request, reply)), reply.created_unix_s
        )

    def streamer(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> Streamer:
        """Return a writer of `response.created` to `response.completed`."""
        return ResponseStream(request, reply_id, created_unix_s)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error, in the shape of OpenAI's chat."""
        return OpenAIChat().error(refusal)


def _previous(given: str) -> tuple[str, str]:
    """Return the reply that an id of a response names, and the mark of the instructions there."""
    reply_id, _, mark = given.removeprefix(ID_PREFIX).partition("_")
    return reply_id, mark


def _mark(instructions: str) -> str:
    return hashlib.sha256(instructions.encode("utf-8", "replace")).hexdigest()[:_MARK_CHARS]


def _instructed(messages: list[Message], instructions: str, in_force: str) -> list[Message]:
    """Return messages with the instructions in front, unless they are in force already.

    Results of calls stay in front of them: they stand right behind their calls.
    """
    if in_force == _mark(instructions):
        return messages
    at = next((place for place, one in enumerate(messages) if one["role"] != "tool"), len(messages))
    return [*messages[:at], {"role": "system", "content": instructions}, *messages[at:]]


def _call_rule(body: Mapping[str, Any]) -> CallRule:
    choice = body.get("tool_choice")
    if choice is None or choice == "auto":
        return CallRule.AUTO
    if choice == "none":
        return CallRule.NONE
    shown = choice.get("type") if isinstance(choice, Mapping) else choice
    raise rules.forced_choice(f"{shown!r:.60}")


def _include(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise Refusal(ErrorKind.INVALID, "include: a list of names", param="include")
    return given


def _pinned_text(config: Any) -> Iterator[str]:
    """Yield what of `text` is the run's own.

    Raises:
        Refusal: it asks for a format.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise Refusal(ErrorKind.INVALID, "text: expected an object", param="text")
    wanted = config.get("format")
    if wanted is not None and not rules.is_text_format(wanted):
        raise Refusal(
            ErrorKind.INVALID,
            'text.format may only be {"type": "text"} or left out: replies are sampled without a '
            "grammar; say in the instructions which form you want",
            param="text.format",
        )
    if config.get("verbosity") is not None:
        yield "text.verbosity"

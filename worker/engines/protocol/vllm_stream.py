"""vLLM's reply as a stream: the new ids of each event, and the whole reply of all of them.

Owns how vLLM streams its two token routes. Never validates a whole reply (`vllm_reply` does).
Invariant: `joined` has the fields, and the lists, of the body that vLLM would have answered without
a stream, as far as `vllm_reply` reads them.

Events are deltas. Which weights sampled what, the experts, and why it ended are in the last one;
the counts follow in an event without choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .streams import Joiner, decode_event, no_finish, odd_event
from .vllm_reply import ID_PREFIXES, check_choices, check_name
from .vllm_request import Route

if TYPE_CHECKING:
    from .http_base import Sent

INTERVAL = 16
"""New tokens of an event: each costs a decode here and a validation there."""


class _LogProbs(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw()
    token_logprobs: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = msgspec.Raw(b"null")
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: _LogProbs | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    weight_versions: msgspec.Raw = msgspec.Raw(b"null")


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    request_id: str | None = None
    id: str | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    metrics: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


_EVENT = msgspec.json.Decoder(_Event)
_ENCODER = msgspec.json.Encoder()
_NULL = b"null"
_LISTS = ("content", "token_logprobs", "tokens")


class VllmJoiner(Joiner):
    """Of one reply of `/inference/v1/generate` or `/v1/completions`."""

    def __init__(self, sent: Sent, route: Route) -> None:
        super().__init__(sent)
        self._prefix = ID_PREFIXES[route]
        self._said: dict[str, bytes] = {}
        """What the reply says once, as JSON: the newest of each."""
        self._lists: dict[str, list[bytes]] = {}
        """Log-probs: pieces of the lists that they are said in, without brackets."""
        self._end = _Choice()

    def add(self, data: bytes) -> list[int]:
        """Take an event, and return the ids that are new in it (`Joiner.add`)."""
        event = self._read(data)
        assert event.choices is not None
        self._note("usage", event.usage)
        self._note("metrics", event.metrics)
        self._note("prompt_token_ids", event.prompt_token_ids)
        if not event.choices:
            return []
        if self.is_whole:
            raise odd_event(data, self._sent.engine, is_late=True)
        check_choices(len(event.choices), event.choices[0].index, self._sent.engine)
        (choice,) = event.choices
        new = choice.token_ids or []
        self._note("choice_prompt_token_ids", choice.prompt_token_ids)
        if choice.logprobs is not None and new:
            # Without ids there are none; older servers said all of them again, with an abort.
            self._add_log_probs(choice.logprobs)
        if choice.finish_reason is not None:
            self.is_whole, self._end = True, _copied(choice)
            return []
        self.ids += new
        return new

    def _read(self, data: bytes) -> _Event:
        engine = self._sent.engine
        event = decode_event(_EVENT, data, engine)
        if event.choices is None:
            raise odd_event(data, engine, is_late=False)
        said = event.request_id if event.request_id is not None else event.id
        check_name(said, self._prefix + self._sent.rid, engine)
        return event

    def _note(self, name: str, value: msgspec.Raw) -> None:
        if bytes(value) != _NULL:
            self._said[name] = bytes(value)

    def _add_log_probs(self, given: _LogProbs) -> None:
        for name in _LISTS:
            text = bytes(getattr(given, name)).strip()
            if not text or text == _NULL:
                continue
            if text[:1] != b"[":
                raise odd_event(text, self._sent.engine, is_late=False)
            if inner := text[1:-1].strip():
                self._lists.setdefault(name, []).append(inner)

    def joined(self) -> bytes:
        """Return the reply as vLLM would have answered it without a stream (`Joiner.joined`)."""
        if not self.is_whole:
            raise no_finish(self._sent.engine)
        end, said = self._end, self._said
        log_probs = {
            name: msgspec.Raw(b"[%b]" % b",".join(pieces)) for name, pieces in self._lists.items()
        }
        choice = {
            "index": 0,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            "token_ids": [*self.ids, *(end.token_ids or ())],
            "prompt_token_ids": msgspec.Raw(said.get("choice_prompt_token_ids", _NULL)),
            "logprobs": log_probs or None,
            "routed_experts": end.routed_experts,
            "weight_versions": end.weight_versions,
        }
        return _ENCODER.encode(
            {
                "request_id": self._prefix + self._sent.rid,
                "choices": [choice],
                **{
                    name: msgspec.Raw(said.get(name, _NULL))
                    for name in ("usage", "metrics", "prompt_token_ids")
                },
            }
        )


def _copied(choice: _Choice) -> _Choice:
    """Return the last piece without the event around it, of which its raw fields are parts."""
    for name in ("stop_reason", "routed_experts", "weight_versions"):
        setattr(choice, name, getattr(choice, name).copy())
    choice.logprobs, choice.prompt_token_ids = None, msgspec.Raw(_NULL)
    return choice

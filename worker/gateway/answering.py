"""From a request to the tokens in front of its reply, and from what was sampled to the reply.

Owns the two ends of a call and what a client is told of a prompt without room. Never calls an
engine, never touches the tree. Invariant: a prompt behind a reply is that reply's tokens and an
appended suffix, never rendered again; the message of a reply is read from its ids alone.
"""

from __future__ import annotations

import numpy as np

from rollstream.errors import StopReason
from rollstream.sample import TokenIds

from ..offload import call
from ..tito.tokenizer import LONG_IDS
from ..types import Finish, GenerateInput
from .calling import NoRoom, Sampled
from .context import Context
from .growing import GrowingReply
from .placing import Place
from .reply import call_rule, finish_word, reply_message
from .rules import Prompting
from .types import ChatReply, ChatRequest, ErrorKind, Refusal


class Answers:
    """Renders and reads for one session."""

    def __init__(self, given: GenerateInput, prompter: Prompting) -> None:
        self._given, self._prompter = given, prompter
        self._root = given.prompt
        """The last prompt of a root: a request that comes again holds nothing anew."""

    async def render(self, request: ChatRequest, place: Place) -> Context:
        """Return the tokens in front of a reply.

        Raises:
            Refusal: the messages cannot be rendered; names one.
        """
        parent, tools = place.parent, request.tools
        messages = list(place.echo.messages[place.start :])
        if parent is None:
            prompt = await self._prompter.first(messages, tools)
            # Mostly the prompt of the group, which all its members hold once.
            for known in (self._given.prompt, self._root):
                if np.array_equal(known.ids, prompt.ids):
                    return Context(None, known)
            self._root = prompt
            return Context(None, prompt)
        appended = await self._prompter.append(
            self._window(parent.context),
            parent.context.sampled(),
            messages,
            tools,
            reply=parent.message,
            first_place=place.start,
        )
        return Context.behind(parent.context, appended)

    def growing(self, context: Context) -> GrowingReply:
        """Return what reads the reply behind `context` while it is sampled."""
        return GrowingReply(self._given.renderer, self._window(context))

    async def reply(
        self,
        request: ChatRequest,
        context: Context,
        sampled: Sampled,
        *,
        reply_id: str,
        created_unix_s: float,
    ) -> ChatReply:
        """Return what a client is told of what was sampled."""
        ids, parse = context.sampled(), self._given.renderer.parse
        is_cut = sampled.cut is not None
        parsed = await call(len(ids) > LONG_IDS, parse, ids, self._window(context), request.tools)
        message = reply_message(parsed, call_rule(request, is_cut=is_cut), request.max_calls)
        log_probs = [answer.completion.log_probs for answer in context.answers]
        return ChatReply(
            id=reply_id,
            message=message,
            finish=finish_word(Finish.LENGTH if is_cut else Finish.STOP, message),
            ids=ids,
            log_probs=log_probs[0] if len(log_probs) == 1 else np.concatenate(log_probs),
            pieces=await self.pieces(ids) if request.log_probs else (),
            num_prompt=context.num_prompt,
            num_cached=sampled.num_cached,
            created_unix_s=created_unix_s,
            stop_text=sampled.stop_text,
            num_reasoning=parsed.num_reasoning,
        )

    async def pieces(self, ids: TokenIds) -> list[str]:
        """Return what each id stands for."""
        return await call(len(ids) > LONG_IDS, self._given.renderer.pieces, ids)

    def too_long(self, full: NoRoom) -> Refusal:
        """Return what a client is told of a prompt without room, in words that SDKs know."""
        limits = self._given.limits
        most = min(limits.max_context, limits.max_seq_len or limits.max_context)
        whose = ""
        if full.bound is StopReason.RESPONSE_LENGTH:
            whose = f", {limits.max_response} of them behind the first prompt"
        return Refusal(
            ErrorKind.TOO_LONG,
            f"This model's maximum context length is {most} tokens{whose}. However, your messages "
            f"resulted in {full.num_tokens} tokens: the prompt is too long. Please reduce the "
            "length of the messages.",
            param="messages",
        )

    def _window(self, context: Context) -> TokenIds:
        return context.window(self._given.renderer.stop_token_ids)

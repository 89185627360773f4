"""What a chat template finds beside Jinja's own names: `dict`, `namespace`, `{% generation %}`.

Owns these three. Never shows a type's attributes or a private name. Invariant: what they make holds
plain data, and prints as the template could have written itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    """`{% generation %}`, with which templates mark assistant text for masks; here only its body.

    Our masks come from what was sampled.
    """

    tags = {"generation"}  # noqa: RUF012 - the library's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        """Return what stands between the tags."""
        return caller()


class Dict:
    """`dict(…)` without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return an object."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return an object with these keys."""
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """`namespace(…)` that takes no private name, and does not print what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a key
        self, *rest = args
        given = dict(*rest, **kwargs)
        for name in given:
            _public(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no private name ({name!r})")

"""From the table `model` of the configuration to the renderer that a worker uses.

Owns which settings go where. Never reads a file itself. Invariant: whatever is wrong is one
`ConfigError` that names the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstream.settings import ModelTable

from .hub import locate
from .tito.load import TEMPLATE, LoadedRenderer, load_renderer

if TYPE_CHECKING:
    from .tito.template import TemplateOptions


def load_model(table: ModelTable) -> LoadedRenderer:
    """Return the renderer of a model, tried; may fetch its small files where a hub id was given.

    Raises:
        ConfigError: see `locate` and `load_renderer`.
    """
    options = _template_options(table) if table.renderer == TEMPLATE else None
    return load_renderer(locate(table.tokenizer), table.renderer, options)


def _template_options(table: ModelTable) -> TemplateOptions:
    from .tito.template import TemplateOptions

    return TemplateOptions(
        chat_template=table.chat_template,
        boundaries=table.boundaries,
        tool_parser=table.tool_parser,
        reasoning_parser=table.reasoning_parser,
        date=table.template_date,
        names=table.template_names,
    )

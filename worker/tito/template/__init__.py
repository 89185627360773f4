"""The renderer of any Hugging Face chat template.

files       what a model's folder says: its template, its special tokens
sandbox     jinja2 in Hugging Face's settings, bounded
form        how this template wants arguments, empty content, late system messages: by probes
boundaries  what closes a turn, per kind of format, in one table
turns       the suffix behind a turn, and its proof at start
replies     reasoning and calls of a reply
backend     the `Renderer` made of these
"""

from __future__ import annotations

from .backend import TemplateBackend, TemplateOptions

__all__ = ["TemplateBackend", "TemplateOptions"]

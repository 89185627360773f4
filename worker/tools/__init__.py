"""Tools that the model may call: what they take, how they run, what the model reads of them."""

from .bound import BoundTool, SelfBounded
from .caps import Cap, cut
from .function import FunctionTool
from .load import BUILT_IN, ToolLoader, load_tools, tool_label, tool_specs
from .outcome import OK, ToolError, ToolTrouble
from .run import Observation, run_call, run_calls
from .text import blob_text, text_of

__all__ = [
    "BUILT_IN",
    "OK",
    "BoundTool",
    "Cap",
    "FunctionTool",
    "Observation",
    "SelfBounded",
    "ToolError",
    "ToolLoader",
    "ToolTrouble",
    "blob_text",
    "cut",
    "load_tools",
    "run_call",
    "run_calls",
    "text_of",
    "tool_label",
    "tool_specs",
]

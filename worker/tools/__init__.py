"""Tools that the model may call: what they take, how they run, what the model reads of them."""

from .function import BUILT_IN, FunctionTool, load_tools, tool_label, tool_specs
from .run import Observation, ToolError, run_call, run_calls
from .text import cut, text_of

__all__ = [
    "BUILT_IN",
    "FunctionTool",
    "Observation",
    "ToolError",
    "cut",
    "load_tools",
    "run_call",
    "run_calls",
    "text_of",
    "tool_label",
    "tool_specs",
]

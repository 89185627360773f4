"""Tokens: renderers, trajectories and the merge. Does no I/O."""

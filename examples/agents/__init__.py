"""Agents as people write them, run by the gateway without a change (docs/agents.md)."""

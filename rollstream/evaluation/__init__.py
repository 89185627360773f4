"""Evaluations: groups of their own beside training."""

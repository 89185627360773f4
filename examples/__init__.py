"""Runnable examples and what they need: a development server and a real vocabulary."""

"""`show --html`: one group as one file that needs nothing else.

Owns the page. Never asks a network, never runs what a model or a user wrote. Invariant: every text
from outside is escaped in one place (`escape`), and the page forbids itself every request.
"""

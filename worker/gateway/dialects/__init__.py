"""Chat APIs as clients speak them: each translates to `gateway.types` and back.

Owns one module per API. Never holds a session, never renders. Invariant: what a dialect cannot
carry is listed in its `cannot_carry`, and refused or ignored by the one rule of `rules.py`.
"""

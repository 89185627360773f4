"""A whole run under chaos: real processes that are killed, frozen and cut off, and one judgement.

`python -m tests.e2e.chaos --seconds 60 --seed 1 --json`; docs/chaos.md says what it does.
"""

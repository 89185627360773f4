"""Tests of environments: their lives, what they may return, and how they are named."""

"""Tests of environments over real servers and real processes."""

"""Sizes, round trips, memory and back-pressure: everything that must stay bounded."""

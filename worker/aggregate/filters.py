"""Filters: pure functions over a `GroupView`."""

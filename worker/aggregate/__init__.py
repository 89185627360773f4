"""The aggregator: judges full groups."""

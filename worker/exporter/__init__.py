"""The exporter: one service that measures a run as a whole, from its state in Redis."""

"""The process of a worker: its start, its loop, its heart, what it hears, and its end."""

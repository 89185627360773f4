"""The command line: `rollstream …` and `python -m rollstream.cli …`.

Owns commands for people and scripts around a run. Never on the path of a sample. Invariant: what
it prints for `--json` is one JSON document on standard output, everything else goes to standard
error, and the exit code says what happened (`rollstream.cli.exits`).
"""

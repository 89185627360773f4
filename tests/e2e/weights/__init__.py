"""The proof of moving weights: what is trained is what its recorded version sampled.

    python -m tests.e2e.weights --json

Runs the whole service (Valkey, a producer, two workers, two simulated engines, a trainer) through
weight updates in both modes, over both protocols, with and without partial rollouts, while engines
abort everything, stand still and a worker is killed, and evaluates in between. Then every delivered
sample is computed again. `--break WHAT` damages the run or its records, and must make the proof
fail. docs/weights.md says what each figure means.
"""

"""The checkpoint is the authority: measured on real processes that are killed while they train.

`python -m tests.e2e.resume` trains every prompt of two epochs while producer, workers, trainer and
Redis (with its data, without its last second, without any) are killed at random, and the trainer
starts again from checkpoints that are older than what it trained. At the end the surviving history
of checkpoints must hold every prompt exactly once.
"""

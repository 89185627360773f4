"""The stack of docker-compose.yml as processes: what `tests/ops/test_stack.py` starts and asks."""

"""The proof of the gateway: agents that misbehave in every way, judged by what the engines saw.

Agents are scripts over plain HTTP and over two real SDKs. They run inside two real workers, one of
which is killed; every request and answer of theirs is a line in a journal, and so is every call at
the engines' doors. A judge that knows nothing of the gateway holds the samples that a trainer got
against both.

    python -m tests.e2e.agents --json
"""

"""The gateway: any agent that speaks a chat API, against one session per leased sample.

Owns the way from a client's request to token ids and back, and what a session's calls become as
samples. Never leases, reports or scores. Invariant: what was answered to a client is what an engine
sampled, behind exactly the ids that are recorded for it; what was not answered is not trained.

    server   HTTP: routes, bodies, streams of events, limits        (knows no dialect's fields)
    dialects OpenAI chat, Anthropic Messages, OpenAI Responses      (know no session)
    session  one agent's calls: attach, sample, commit, close       (knows no HTTP)
    tree     the conversation as nodes; matchers say which is which
    collect  the nodes as `Sample | list[Sample]`
"""

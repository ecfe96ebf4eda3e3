"""Replaying a trace of requests through the store's own core, without bytes and without waiting.

`trace` reads and writes traces, `generate` makes some, `workload` turns one into blocks, `driver`
sends them through a core, `counts` is what comes of it. docs/replay.md says what each number means.
"""

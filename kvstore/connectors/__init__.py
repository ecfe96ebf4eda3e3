"""Connectors: an engine's words on one side, a session's on the other. One module per engine.

A connector may import its engine; nothing else in kvstore does.
"""

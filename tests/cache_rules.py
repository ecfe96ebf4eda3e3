"""Two rules of caching, said in a few lines each, to compare whole replays with."""

from __future__ import annotations


def lru_n(prompts, capacity):
    """Hits of each request: each block by itself, in order, to the end of one list."""
    order: dict[object, None] = {}
    hits = []
    for ids in prompts:
        hits.append(_resident_prefix(ids, order))
        for block_id in ids:
            if block_id not in order and len(order) >= capacity:
                del order[next(iter(order))]
            order.pop(block_id, None)
            order[block_id] = None
    return hits


def lru_r(prompts, capacity):
    """Hits of each request: room is made for all of it first, and its root is the most recent."""
    order: dict[object, None] = {}
    hits = []
    for ids in prompts:
        hits.append(_resident_prefix(ids, order))
        for block_id in ids:
            order.pop(block_id, None)
        while len(order) + len(ids) > capacity:
            del order[next(iter(order))]
        order.update(dict.fromkeys(reversed(ids)))
    return hits


def _resident_prefix(ids, order):
    for position, block_id in enumerate(ids):
        if block_id not in order:
            return position
    return len(ids)

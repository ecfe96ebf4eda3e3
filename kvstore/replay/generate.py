"""Workloads of our own, so that nobody needs a download: the same from a seed on every machine.

Every quantity is drawn from a table of quantiles with straight lines between them, by one
`random.Random(seed)`: sums, products and comparisons of floats, which are the same everywhere.
The tables of `chat` follow the trace of a production chat service that Mooncake published
(FAST'25); those of `agent` follow what coding agents do. docs/replay.md says what comes out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, Protocol

from kvstore.replay.trace import TraceRequest
from kvstore.replay.workload import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: However many requests there are, as many come in an hour once sessions have begun.
SPAN_MS = 3_600_000


class Quantiles:
    """A distribution: (probability, value) pairs, both rising, from 0 to 1."""

    def __init__(self, *points: tuple[float, float]) -> None:
        self._probabilities = [probability for probability, _ in points]
        self._values = [value for _, value in points]

    def draw(self, rng: Random) -> int:
        """One value, rounded down."""
        uniform = rng.random()
        right = bisect_right(self._probabilities, uniform)
        left_p, right_p = self._probabilities[right - 1 : right + 1]
        left, right_value = self._values[right - 1 : right + 1]
        return int(left + (right_value - left) * ((uniform - left_p) / (right_p - left_p)))

    @property
    def mean(self) -> float:
        """The mean of many draws."""
        pairs = list(zip(self._probabilities, self._values, strict=True))
        return sum((p1 - p0) * (v0 + v1) / 2 for (p0, v0), (p1, v1) in pairwise(pairs))


#: Gaps between independent arrivals whose mean is 1,000.
ARRIVAL_GAPS = Quantiles(
    (0.0, 0), (0.1, 105), (0.25, 288), (0.5, 693), (0.75, 1386), (0.9, 2303), (0.98, 3912),
    (1.0, 6200),
)  # fmt: skip


@dataclass(slots=True)
class Context:
    """A sequence of tokens that grows, as the ids of its blocks. Ids come from one counter."""

    numbers: Iterator[int]
    block_tokens: int
    tokens: int = 0
    ids: list[int] = field(default_factory=list)  # of full blocks

    def grow(self, tokens: int) -> None:
        """Append tokens that nobody else has."""
        self.tokens += tokens
        new_blocks = self.tokens // self.block_tokens - len(self.ids)
        self.ids += [next(self.numbers) for _ in range(new_blocks)]

    def grown(self, tokens: int) -> Context:
        """Another sequence, with the same beginning and so many tokens of its own."""
        longer = Context(self.numbers, self.block_tokens, self.tokens, list(self.ids))
        longer.grow(tokens)
        return longer

    def request(self, timestamp_ms: int, output_tokens: int) -> TraceRequest:
        """A request with all of it as the prompt. A final partial block has an id of its own."""
        partial = [next(self.numbers)] if self.tokens % self.block_tokens else []
        return TraceRequest(timestamp_ms, self.tokens, output_tokens, self.ids + partial)


class Session(Protocol):
    """One user, or one agent, whose prompt grows from request to request."""

    def next_request(self, now_ms: int) -> tuple[TraceRequest, int | None]:
        """The request that it makes now, and when the next one comes; None: that was the last."""
        ...


def _play(
    begin: Callable[[], Session], mean_requests: float, rng: Random, requests: int
) -> Iterator[TraceRequest]:
    """Let sessions begin independently of each other until there are so many requests."""
    mean_gap_ms = SPAN_MS * mean_requests / requests
    order = count()  # breaks ties, so that sessions are never compared
    waiting: list[tuple[int, int, Session | None]] = [(0, next(order), None)]
    made = 0
    while made < requests:
        now_ms, _, session = heappop(waiting)
        if session is None:
            gap_ms = int(ARRIVAL_GAPS.draw(rng) * mean_gap_ms / ARRIVAL_GAPS.mean)
            heappush(waiting, (now_ms + gap_ms, next(order), None))
            session = begin()
        request, next_ms = session.next_request(now_ms)
        yield request
        made += 1
        if next_ms is not None:
            heappush(waiting, (next_ms, next(order), session))


# -- chat ------------------------------------------------------------------------------------

#: Tokens of what the service itself puts before every conversation, by how often it is used.
_CHAT_SYSTEM_TOKENS = (620, 610, 1_150, 900, 2_100, 640)
_CHAT_SYSTEM_CHOICE = Quantiles((0.0, 0), (0.7, 1), (0.85, 2), (1.0, 6))
_CHAT_FIRST_TOKENS = Quantiles(
    (0.0, 10), (0.25, 900), (0.5, 4_600), (0.75, 12_000), (0.95, 33_000), (0.99, 75_000),
    (1.0, 120_000),
)  # fmt: skip
_CHAT_NEXT_TOKENS = Quantiles(
    (0.0, 5), (0.5, 350), (0.75, 2_600), (0.95, 13_000), (0.99, 25_000), (1.0, 40_000)
)
_CHAT_OUTPUT_TOKENS = Quantiles(
    (0.0, 2), (0.05, 10), (0.25, 156), (0.5, 350), (0.75, 472), (0.95, 698), (1.0, 1_500)
)
#: Until the user goes on, in milliseconds.
_CHAT_RETURN_MS = Quantiles(
    (0.0, 4_000), (0.05, 30_000), (0.19, 60_000), (0.46, 120_000), (0.76, 300_000),
    (0.93, 600_000), (0.98, 1_200_000), (1.0, 2_400_000),
)  # fmt: skip
#: Most ask once and leave; the others go on after each answer with this probability.
_CHAT_TALKERS = 0.3
_CHAT_GOES_ON = 0.68
#: Of those that go on: the same prompt once more, for another answer.
_CHAT_REGENERATES = 0.03


class _Conversation:
    """A user, who mostly asks one thing and leaves."""

    def __init__(self, rng: Random, system: Context) -> None:
        self._rng = rng
        self._context = system.grown(_CHAT_FIRST_TOKENS.draw(rng))
        self._goes_on = _CHAT_GOES_ON if rng.random() < _CHAT_TALKERS else 0.0
        self._last: TraceRequest | None = None

    def next_request(self, now_ms: int) -> tuple[TraceRequest, int | None]:
        rng = self._rng
        request = self._last and self._last._replace(timestamp_ms=now_ms)
        if request is None:
            output_tokens = _CHAT_OUTPUT_TOKENS.draw(rng)
            request = self._context.request(now_ms, output_tokens)
        self._last = None
        if rng.random() >= self._goes_on:
            return request, None
        if rng.random() < _CHAT_REGENERATES:
            self._last = request
        else:
            self._context.grow(request.output_tokens + _CHAT_NEXT_TOKENS.draw(rng))
        return request, now_ms + _CHAT_RETURN_MS.draw(rng)


def _chat(rng: Random, start: Context, requests: int) -> Iterator[TraceRequest]:
    systems = [start.grown(tokens) for tokens in _CHAT_SYSTEM_TOKENS]

    def begin() -> Session:
        return _Conversation(rng, systems[_CHAT_SYSTEM_CHOICE.draw(rng)])

    mean_requests = 1 + _CHAT_TALKERS * _CHAT_GOES_ON / (1 - _CHAT_GOES_ON)
    return _play(begin, mean_requests, rng, requests)


# -- agent -----------------------------------------------------------------------------------

#: Tokens of each agent's instructions and tools, which all its sessions share.
_AGENT_SYSTEM_TOKENS = (17_400, 11_900, 23_300)
_AGENT_SYSTEM_CHOICE = Quantiles((0.0, 0), (0.6, 1), (0.85, 2), (1.0, 3))
_AGENT_TASK_TOKENS = Quantiles((0.0, 50), (0.5, 600), (0.9, 6_000), (1.0, 20_000))
_AGENT_RESULT_TOKENS = Quantiles((0.0, 20), (0.5, 450), (0.9, 3_500), (0.98, 9_000), (1.0, 16_000))
_AGENT_OUTPUT_TOKENS = Quantiles((0.0, 20), (0.5, 140), (0.9, 500), (1.0, 2_500))
#: From one request to the next while the agent works: its own output, and the tool.
_AGENT_STEP_MS = Quantiles(
    (0.0, 1_500), (0.5, 14_000), (0.75, 36_000), (0.9, 90_000), (1.0, 420_000)
)
#: From the end of a task to the user's next.
_AGENT_PAUSE_MS = Quantiles((0.0, 10_000), (0.5, 90_000), (0.8, 300_000), (1.0, 1_500_000))
_AGENT_TASK_ENDS = 0.1
_AGENT_SESSION_ENDS = 0.3  # of the ends of tasks
_AGENT_CONTEXT_TOKENS = 160_000
_AGENT_SUMMARY_TOKENS = 3_000


class _AgentSession:
    """An agent that calls tools in quick succession, and a user who gives it tasks."""

    def __init__(self, rng: Random, system: Context) -> None:
        self._rng = rng
        self._system = system
        self._context = system.grown(_AGENT_TASK_TOKENS.draw(rng))

    def next_request(self, now_ms: int) -> tuple[TraceRequest, int | None]:
        rng = self._rng
        request = self._context.request(now_ms, _AGENT_OUTPUT_TOKENS.draw(rng))
        is_end_of_task = rng.random() < _AGENT_TASK_ENDS
        if is_end_of_task and rng.random() < _AGENT_SESSION_ENDS:
            return request, None
        more, gap = _AGENT_RESULT_TOKENS, _AGENT_STEP_MS
        if is_end_of_task:
            more, gap = _AGENT_TASK_TOKENS, _AGENT_PAUSE_MS
        self._context.grow(request.output_tokens + more.draw(rng))
        if self._context.tokens > _AGENT_CONTEXT_TOKENS:
            self._context = self._system.grown(_AGENT_SUMMARY_TOKENS)
        return request, now_ms + gap.draw(rng)


def _agent(rng: Random, start: Context, requests: int) -> Iterator[TraceRequest]:
    systems = [start.grown(tokens) for tokens in _AGENT_SYSTEM_TOKENS]

    def begin() -> Session:
        return _AgentSession(rng, systems[_AGENT_SYSTEM_CHOICE.draw(rng)])

    return _play(begin, 1 / (_AGENT_TASK_ENDS * _AGENT_SESSION_ENDS), rng, requests)


#: What kinds of workload there are.
KINDS: dict[str, Callable[[Random, Context, int], Iterator[TraceRequest]]] = {
    "chat": _chat,
    "agent": _agent,
}


def generate(
    kind: str, seed: int, requests: int, block_tokens: int = BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """So many requests of one kind, within an hour or two, in the order of their time.

    Whole numbers and a seed decide everything: neither process nor machine nor hash seed matters.
    """
    return KINDS[kind](Random(seed), Context(count(), block_tokens), requests)

"""A model made of random weights, and the runs that the demo compares."""

from __future__ import annotations

from statistics import median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.cli.demo.parameters import BLOCK_TOKENS, VOCABULARY
from kvstore.connectors.transformers import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import EmbeddedStore
    from kvstore.audit import Audit
    from kvstore.cli.demo.parameters import Parameters
    from kvstore.connectors.transformers import Report

#: With the usual 0.02, random logits are nearly equal, and rounding could decide a token.
INITIALIZER_RANGE = 0.1
SEED = 20

#: Of the engine alone and of the empty store, in turns. The better one of each counts, whatever
#: else the machine did meanwhile.
COLD_RUNS = 2
#: The median one counts: a few hundredths of a second alone would show the machine's mood.
WARM_RUNS = 5

ALONE = "engine alone"
STORE_EMPTY = "store, empty"
STORE_WARM = "store, warm"


class Run(NamedTuple):
    """One call of generate."""

    turn: int
    name: str
    prompt_tokens: int
    tokens: list[int]  # of the answer
    ttft_seconds: float  # from the call to the first token in the streamer's hands
    total_seconds: float
    report: Report | None  # None for the engine alone
    smallest_margin: float | None  # lead of the best logit, where the run was asked for logits

    @property
    def loaded_tokens(self) -> int:
        """Tokens of the prompt that came from the store."""
        return self.report.loaded_tokens if self.report else 0

    @property
    def hits_by_tier(self) -> dict[str, int]:
        """Blocks loaded, by the tier that held them."""
        return dict(self.report.hits_by_tier) if self.report else {}


class Measurement(NamedTuple):
    """Everything that was seen."""

    runs: list[Run]
    parameters_of_model: int
    token_bytes: int
    fingerprint: str
    construct_seconds: float  # of the PrefixCache: mostly hashing all weights
    audit: Audit
    threads: int


def measure(parameters: Parameters, progress: Callable[[str, Run | None], None]) -> Measurement:
    """Make the model, run both turns with and without the store, and let the store check itself.

    `progress` hears of each run before it starts, with None, and after it.
    """
    model = make_model(parameters)
    text = make_text(parameters)
    # So that the first run does not pay for what is only done once.
    model.generate(text[:, :32], do_sample=False, max_new_tokens=2)

    with kvstore.open(dram_capacity_bytes=parameters.capacity_bytes) as store:
        started = perf_counter()
        cache = PrefixCache(model, store, block_tokens=BLOCK_TOKENS)
        construct_seconds = perf_counter() - started
        session = UserSide(model, cache, parameters.new_tokens, progress)

        first = text[:, : parameters.prompt_tokens]
        for _ in range(COLD_RUNS):
            session.run_alone(1, first)
            _empty(store, cache, first, session.runs[0].tokens)
            session.run(1, STORE_EMPTY, first)
        for _ in range(WARM_RUNS):
            session.run(1, STORE_WARM, first)

        answer = torch.tensor([session.runs[0].tokens])
        question = text[:, parameters.prompt_tokens + parameters.new_tokens :]
        second = torch.cat([first, answer, question], dim=1)
        session.run_alone(2, second)
        session.run(2, STORE_WARM, second)
        audit = store.check()
    return Measurement(
        session.runs,
        model.num_parameters(),
        cache.namespace.layout.bytes_per_token,
        cache.namespace.fingerprint,
        construct_seconds,
        audit,
        torch.get_num_threads(),
    )


def only(runs: list[Run], turn: int, name: str) -> Run:
    """The run of that name; of two the faster one, of five the median one."""
    found = [run for run in runs if (run.turn, run.name) == (turn, name)]
    ttft = median_low(run.ttft_seconds for run in found)
    return next(run for run in found if run.ttft_seconds == ttft)


def _empty(
    store: EmbeddedStore, cache: PrefixCache, first: torch.Tensor, answer: list[int]
) -> None:
    """Drop what an earlier run has stored of a prompt and its answer."""
    with store.session(cache.namespace) as session:
        session.delete(cache.namespace.keys([*first[0].tolist(), *answer]))


def make_text(parameters: Parameters) -> torch.Tensor:
    """The token ids of both prompts, the same in each process."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (1, parameters.second_prompt_tokens), generator=generator)


def make_model(parameters: Parameters) -> Any:  # noqa: ANN401 - transformers' type says less
    """The model, with the same random weights in each process."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=parameters.hidden,
        intermediate_size=parameters.intermediate,
        num_hidden_layers=parameters.layers,
        num_attention_heads=parameters.heads,
        num_key_value_heads=parameters.kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=parameters.second_prompt_tokens + parameters.new_tokens,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,  # or a random answer could end early
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


class UserSide:
    """The user's side: the same call each time, now to the model, now to the cache before it."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        cache: PrefixCache,
        new_tokens: int,
        progress: Callable[[str, Run | None], None],
    ) -> None:
        self.runs: list[Run] = []
        self._model = model
        self._cache = cache
        self._progress = progress
        self._arguments = {
            "do_sample": False,
            "max_new_tokens": new_tokens,
            "return_dict_in_generate": True,
        }

    def run_alone(self, turn: int, input_ids: torch.Tensor) -> Run:
        """The engine without the store; also how clearly each token was decided."""
        return self._run(turn, ALONE, input_ids, self._model.generate, output_logits=True)

    def run(self, turn: int, name: str, input_ids: torch.Tensor) -> Run:
        """The same through the store."""
        return self._run(turn, name, input_ids, self._cache.generate)

    def _run(
        self,
        turn: int,
        name: str,
        input_ids: torch.Tensor,
        generate: Callable[..., Any],
        **arguments: object,
    ) -> Run:
        self._progress(f"turn {turn}, {name}", None)
        stopwatch = _Stopwatch()
        output = generate(input_ids, streamer=stopwatch, **self._arguments, **arguments)
        total_seconds = perf_counter() - stopwatch.started
        margin = None
        if output.logits:
            best, second = torch.cat(output.logits).topk(2).values.unbind(1)
            margin = float((best - second).min())
        prompt_tokens = input_ids.shape[1]
        run = Run(
            turn,
            name,
            prompt_tokens,
            output.sequences[0, prompt_tokens:].tolist(),
            stopwatch.first_token - stopwatch.started,
            total_seconds,
            None if name == ALONE else self._cache.last,
            margin,
        )
        self.runs.append(run)
        self._progress(f"turn {turn}, {name}", run)
        return run


class _Stopwatch:
    """A streamer that notes when the first token arrives: the second put, after the prompt."""

    def __init__(self) -> None:
        self.started = self.first_token = perf_counter()
        self._puts = 0

    def put(self, _: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.first_token = perf_counter()

    def end(self) -> None:
        pass

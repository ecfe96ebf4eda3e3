"""What a call of `generate` starts from: its settings, and the tokens of each row.

    column        0  1  2  3  4  5  6  7
    row 0         a  b  c  d  e  f  g  h      padding 0, 8 tokens
    row 1         .  .  .  i  j  k  l  m      padding 3, 5 tokens: positions 0 to 4

Keys depend on a token's position in its row, which is its column less the padding. So a row is the
same sequence as if it were alone, and has the same blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvstore.errors import UnsupportedCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.connectors.transformers.model import DecoderModel


class Prompt(NamedTuple):
    """One row: its columns of padding, and the tokens after them."""

    padding: int
    tokens: list[int]


class Ends(NamedTuple):
    """Which tokens end a row; what `generate` appends to a row after that is not its text."""

    end_tokens: frozenset[int]
    pad_token: int | None

    def text(self, tokens: Iterable[int]) -> tuple[list[int], bool]:
        """The new tokens up to the first end, that one included, and whether there was one.

        What beam search fills the space after an answer with may be no token at all. A pad token
        that is no end token was appended to a row that ended for another reason; where a model
        means it, the row ends too early, which costs a block and no more.
        """
        kept: list[int] = []
        for token in tokens:
            if token in self.end_tokens:
                return [*kept, token], True
            if token < 0 or (self.end_tokens and token == self.pad_token):
                return kept, True
            kept.append(token)
        return kept, False


def setting(model: DecoderModel, arguments: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    """The value that `generate` will use: the call's, its config's, or the model's default."""
    for value in (
        arguments.get(name),
        getattr(arguments.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    ):
        if value is not None:
            return value
    return None


def read_ends(model: DecoderModel, arguments: Mapping[str, Any]) -> Ends:
    """The end tokens and the pad token that a call goes by."""
    end = setting(model, arguments, "eos_token_id")
    pad = setting(model, arguments, "pad_token_id")
    ends = [] if end is None else torch.as_tensor(end).reshape(-1).tolist()
    return Ends(frozenset(ends), None if pad is None else int(pad))


def read_columns_max(
    model: DecoderModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> int | None:
    """How many columns the answers may have with their prompts; None where nobody says it."""
    new_tokens = setting(model, arguments, "max_new_tokens")
    if new_tokens is not None:
        return input_ids.shape[1] + int(new_tokens)
    columns = setting(model, arguments, "max_length")
    return None if columns is None else int(columns)


def read_prompts(
    model: DecoderModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> list[Prompt]:
    """The rows of `input_ids`, [rows, tokens], by the mask that is given or that `generate` makes.

    Raises UnsupportedCache for a mask that hides anything but padding on the left.
    """
    mask = arguments.get("attention_mask")
    source = "attention_mask"
    if mask is None:
        mask, source = _own_mask(model, input_ids, arguments), "the pad token"
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise UnsupportedCache(
            f"attention_mask of shape {list(mask.shape)}; supported: that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    seen = mask != 0
    if not bool((mask == seen).all()):
        raise UnsupportedCache("attention_mask has other values than 0 and 1; supported: 0 and 1")
    # From its first token on a row shows every column.
    holes = seen[:, :-1] & ~seen[:, 1:]
    if bool(holes.any()):
        row, column = holes.nonzero()[0].tolist()
        raise UnsupportedCache(
            f"{source} hides column {column + 1} of row {row} after tokens that are seen; "
            "supported: padding on the left (padding_side='left')"
        )
    counts = seen.sum(dim=1).tolist()
    if 0 in counts:
        raise UnsupportedCache(f"row {counts.index(0)} has no token, or {source} hides all of them")
    columns = input_ids.shape[1]
    rows: list[list[int]] = input_ids.tolist()
    return [
        Prompt(columns - count, row[columns - count :])
        for row, count in zip(rows, counts, strict=True)
    ]


def _own_mask(
    model: DecoderModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Without a mask, generate takes a pad token for padding, unless that token ends texts too."""
    ends, pad = read_ends(model, arguments)
    if pad is None or pad in ends:
        return torch.ones_like(input_ids)
    return input_ids != pad

"""What the connector needs of the two that it joins: a model and a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from kvstore.client.session import Session
    from kvstore.keys import Namespace


class DecoderModel(Protocol):
    """A model of transformers: any `PreTrainedModel` that can `generate`."""

    training: bool

    @property
    def config(self) -> Any:  # noqa: ANN401 - each architecture has fields of its own
        """Its configuration."""

    @property
    def generation_config(self) -> Any:  # noqa: ANN401
        """The defaults of `generate`."""

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its weights."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its constants."""

    def modules(self) -> Iterator[Any]:
        """Its parts, and itself."""

    def generate(self, *inputs: Any, **arguments: Any) -> Any:  # noqa: ANN401
        """Continue a sequence."""

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:  # noqa: ANN401
        """One forward pass."""


class Store(Protocol):
    """An open store: embedded, or one that is reached through a daemon."""

    def session(self, namespace: Namespace) -> Session:
        """Read and write the blocks of one namespace."""
        ...

"""What the decoder models have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention_backend import AttentionMetadata
from ..device import get_device
from ..model_config import ModelConfig
from ..modules.linear import Embedding, Linear
from ..modules.rms_norm import RMSNorm
from ..modules.rotary_embedding import RotaryEmbedding
from ..utils import AuxStreamType
from .weight_loader import load_model_weights

MODEL_CLASS_MAPPING: dict[str, Callable[[ModelConfig], DecoderModelForCausalLM]] = {}
_Class = TypeVar("_Class", bound="Callable[[ModelConfig], DecoderModelForCausalLM]")


def register_auto_model(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: the model of architecture `name`."""

    def register(cls: _Class) -> _Class:
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return register


def create_aux_streams() -> dict[AuxStreamType, Any] | None:
    """The streams that all layers of a model share; None where the engine runs on CPU."""
    if get_device().type != "cuda":
        return None
    return {AuxStreamType.MoeChunkingOverlap: torch.cuda.Stream()}


def require(config: Any, **supported: tuple[Any, ...]) -> None:
    """ValueError naming the first field of `config` whose value is not among the supported ones."""
    for name, values in supported.items():
        value = getattr(config, name, values[0])
        if value not in values:
            choices = " or ".join(map(repr, values))
            raise ValueError(f"{config.architectures[0]}: {name}={value!r} is not supported, only {choices}")


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm. Subclasses answer `make_layer`."""

    def __init__(self, model_config: ModelConfig, rope_dim: int) -> None:
        super().__init__()
        config, dtype = model_config.pretrained_config, model_config.torch_dtype
        self.model_config = model_config
        self.aux_stream_dict = create_aux_streams()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary_emb = RotaryEmbedding(rope_dim, config.rope_parameters, config.max_position_embeddings)
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def make_layer(self, layer_idx: int) -> nn.Module:
        """The decoder layer of this index."""
        raise TypeError(f"{type(self).__name__} does not say what its layers are")

    def forward(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]` of ids `[num_tokens]` at positions `[1, num_tokens]`.

        ValueError unless exactly one of ids and embeddings is given.
        """
        if (input_ids is None) == (inputs_embeds is None) or position_ids is None:
            raise ValueError("expected position_ids and exactly one of input_ids and inputs_embeds")
        hidden: torch.Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rope = self.rotary_emb(position_ids.view(-1), hidden.dtype)
        kv = attn_metadata.step_tensors.kv_view()
        for layer in self.layers:
            hidden = layer(position_ids, hidden, attn_metadata, rope=rope, kv=kv)
        out: torch.Tensor = self.norm(hidden)
        return out


class DecoderModelForCausalLM(nn.Module):
    """A decoder with a language-model head."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.model_config = config
        self.config = config.pretrained_config
        self.model = model
        self.vocab_size_padded: int = self.config.vocab_size
        self.lm_head = self.make_lm_head()

    def make_lm_head(self) -> nn.Module | None:
        """The head, which shares the embedding's matrix where the checkpoint ties them."""
        head = Linear(self.config.hidden_size, self.config.vocab_size, dtype=self.model_config.torch_dtype)
        if self.config.tie_word_embeddings:
            embed_tokens: Embedding = self.model.get_submodule("embed_tokens")  # type: ignore[assignment]
            head.weight = embed_tokens.weight
        return head

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.model.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        size: int = self.config.vocab_size
        return size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.model_config.torch_dtype

    def forward(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_context_logits: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Logits float32 `[num_seqs, vocab]` of the sequences' last rows, or `[num_tokens, vocab]` of all."""
        hidden = self.model(attn_metadata, input_ids, position_ids, inputs_embeds, **kwargs)
        return self.logits(self.select_rows(hidden, attn_metadata, return_context_logits))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[rows, vocab]` of hidden states."""
        assert self.lm_head is not None
        out: torch.Tensor = self.lm_head(hidden)
        return out.float()

    @staticmethod
    def select_rows(rows: torch.Tensor, attn_metadata: AttentionMetadata, everything: bool) -> torch.Tensor:
        """The last row of each sequence, or everything."""
        if everything or attn_metadata.num_contexts == 0:
            return rows
        return rows[attn_metadata.step_tensors.last_tokens]

    def rename_weight(self, name: str) -> str:
        """Name of a checkpoint's tensor in the form that the modules know."""
        return name

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], allow_partial_loading: bool = False, **kwargs: Any
    ) -> None:
        """Fill the parameters in place from a checkpoint's tensors, so that graphs see the new values.

        Tensors of layers behind the last one (multi-token prediction) are ignored. ValueError for unknown
        names and wrong shapes, and for lacking ones unless `allow_partial_loading`.
        """
        renamed = {self.rename_weight(name): tensor for name, tensor in weights.items()}
        load_model_weights(self, renamed, self.config.num_hidden_layers, allow_partial_loading)

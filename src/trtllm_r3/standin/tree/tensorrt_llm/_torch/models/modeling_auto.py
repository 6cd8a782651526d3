"""From a configuration to its model."""

from __future__ import annotations

from ..model_config import ModelConfig
from .modeling_utils import MODEL_CLASS_MAPPING, DecoderModelForCausalLM

__all__ = ["MODEL_CLASS_MAPPING", "AutoModelForCausalLM"]


class AutoModelForCausalLM:
    """Builds the model of an architecture."""

    @staticmethod
    def from_config(config: ModelConfig) -> DecoderModelForCausalLM:
        """The model of `config.pretrained_config.architectures[0]`, not loaded, on the default device.

        ValueError for an architecture or an option of it that is not supported.
        """
        name = config.pretrained_config.architectures[0]
        if name not in MODEL_CLASS_MAPPING:
            raise ValueError(
                f"architecture {name!r} is not supported, only {', '.join(sorted(MODEL_CLASS_MAPPING))}"
            )
        return MODEL_CLASS_MAPPING[name](config)

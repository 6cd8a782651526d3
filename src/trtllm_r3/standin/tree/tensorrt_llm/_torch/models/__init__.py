"""Models and their checkpoints."""

from . import modeling_deepseekv3, modeling_mixtral, modeling_oracle, modeling_qwen3_moe  # noqa: F401  (register)
from .checkpoints import load_weights
from .modeling_auto import AutoModelForCausalLM
from .modeling_utils import DecoderModelForCausalLM, register_auto_model

__all__ = ["AutoModelForCausalLM", "DecoderModelForCausalLM", "load_weights", "register_auto_model"]

"""The operator `trtllm::moe_custom_op`: a registered MoE layer, hidden from the compiler."""

from __future__ import annotations

from typing import Any

import torch

from ...op_library import register_op
from ...utils import get_model_extra_attrs


def extract_extra_attrs(layer_idx: str) -> Any:
    """The living MoE layer registered as `layer_idx` in the running model. RuntimeError if there is none."""
    layers = (get_model_extra_attrs() or {}).get("moe_layers") or {}
    reference = layers.get(layer_idx)
    layer = reference() if reference is not None else None
    if layer is None:
        raise RuntimeError(f"no MoE layer is registered for layer_idx={layer_idx!r}")
    return layer


def moe_custom_op(
    layer_idx: str,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    is_swizzled: bool,
    router_logits: torch.Tensor,
    do_finalize: bool,
    output_dtype: torch.dtype | None,
    all_rank_num_tokens: list[int] | None,
    use_dp_padding: bool | None,
) -> list[torch.Tensor]:
    """`forward_impl` of the layer; one tensor `[rows, hidden]` in a list."""
    layer = extract_extra_attrs(layer_idx)
    out: torch.Tensor = layer.forward_impl(
        x,
        router_logits,
        do_finalize=do_finalize,
        output_dtype=output_dtype,
        all_rank_num_tokens=all_rank_num_tokens,
        use_dp_padding=use_dp_padding,
    )
    return [out]


def _fake(
    layer_idx: str,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    is_swizzled: bool,
    router_logits: torch.Tensor,
    *args: Any,
) -> list[torch.Tensor]:
    return [extract_extra_attrs(layer_idx).forward_fake(x, router_logits)]


register_op(
    "trtllm::moe_custom_op(str layer_idx, Tensor x, Tensor? x_sf, bool is_swizzled, Tensor router_logits,"
    " bool do_finalize, ScalarType? output_dtype, int[]? all_rank_num_tokens, bool? use_dp_padding)"
    " -> Tensor[]",
    moe_custom_op,
    _fake,
)

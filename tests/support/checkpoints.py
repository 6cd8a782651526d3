"""Small checkpoints to run, and what transformers routes with them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ORACLE: dict[str, Any] = {
    "architectures": ["OracleMoeForCausalLM"],
    "model_type": "oracle_moe",
    "dtype": "float32",
    "vocab_size": 97,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "hidden_size": 8,
    "moe_intermediate_size": 4,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "weight_version": 0,
}


def write_oracle_checkpoint(path: str | Path, **config: Any) -> dict[str, Any]:
    """An oracle checkpoint in `path`; `config` overrides the defaults. Returns the whole configuration.

    `weight_version` is the tensor `model.weight_version`.
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    whole = {**_ORACLE, **config}
    save_file(oracle_weights(whole), root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
    return whole


def oracle_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of an oracle checkpoint of this configuration."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    weights = {
        "model.weight_version": torch.tensor(config["weight_version"]),
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        weights[layer + "post_attention_layernorm.weight"] = torch.ones(hidden)
        if index >= config["first_k_dense_replace"]:
            weights[layer + "mlp.experts.gate_up_proj"] = normal(experts, 2 * inner, hidden)
            weights[layer + "mlp.experts.down_proj"] = normal(experts, hidden, inner)
        else:
            weights[layer + "mlp.gate_proj.weight"] = normal(inner, hidden)
            weights[layer + "mlp.up_proj.weight"] = normal(inner, hidden)
            weights[layer + "mlp.down_proj.weight"] = normal(hidden, inner)
    return weights


def tiny_qwen3_moe(
    path: str | Path, seed: int = 0, max_shard_size: str | None = None, **overrides: Any
) -> str:
    """A random Qwen3-MoE checkpoint in `path`, as transformers saves it. Returns the path."""
    config = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "intermediate_size": 64,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        **overrides,
    }
    return _save("Qwen3Moe", path, seed, max_shard_size, config)


def tiny_mixtral(path: str | Path, seed: int = 0, max_shard_size: str | None = None, **overrides: Any) -> str:
    """A random Mixtral checkpoint in `path`, as transformers saves it. Returns the path."""
    config = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 7,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        "sliding_window": None,
        **overrides,
    }
    return _save("Mixtral", path, seed, max_shard_size, config)


def tiny_deepseek_v3(
    path: str | Path, seed: int = 0, max_shard_size: str | None = None, **overrides: Any
) -> str:
    """A random DeepSeek-V3 checkpoint in `path`, as transformers saves it, with biases. Returns the path."""
    config = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "intermediate_size": 48,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        **overrides,
    }
    return _save("DeepseekV3", path, seed, max_shard_size, config)


def _save(
    family: str, path: str | Path, seed: int, max_shard_size: str | None, config: dict[str, Any]
) -> str:
    import transformers

    model_class = getattr(transformers, family + "ForCausalLM")
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = model_class(getattr(transformers, family + "Config")(**config))
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.uniform_(buffer, -0.3, 0.3)
        model.eval().save_pretrained(
            str(path), **({"max_shard_size": max_shard_size} if max_shard_size else {})
        )
    hf_model.cache_clear()
    return str(path)


@lru_cache(maxsize=8)
def hf_model(path: str) -> Any:
    """The checkpoint as transformers runs it, float32, plain attention."""
    import transformers

    with _quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def hf_logits(path: str | Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits float32 `[S, vocab]` of a sequence by transformers."""
    with torch.no_grad():
        logits: torch.Tensor = hf_model(str(path))(torch.tensor([list(token_ids)])).logits
    return logits[0].float()


def hf_routes(path: str | Path, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 `[S, L, K]`, scores float32 `[S, L, E]` whose largest they are) by transformers' routers.

    For DeepSeek-V3 the scores are the biased ones, -inf in groups that are out.
    """
    model = hf_model(str(path))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda router, args, out: seen.append(_routed(router, out)))
        for name, module in model.named_modules()
        if name.endswith(".gate")
    ]
    try:
        with torch.no_grad():
            model(torch.tensor([list(token_ids)]))
    finally:
        for hook in hooks:
            hook.remove()
    ids, scores = (torch.stack(parts, 1) for parts in zip(*seen, strict=True))
    return ids, scores


def _routed(router: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores) of one router call: transformers 5 returns (logits, weights, ids)."""
    logits, _, ids = out
    if not hasattr(router, "e_score_correction_bias"):
        scores = torch.softmax(logits.float(), -1)
    else:
        scores = logits.float().sigmoid() + router.e_score_correction_bias
        groups = scores.unflatten(-1, (router.num_group, -1))
        worth = groups.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(worth).scatter_(-1, worth.topk(router.topk_group, -1).indices, 1).bool()
        scores = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    best = scores.topk(ids.shape[-1], -1).indices
    assert torch.equal(best.sort(-1).values, ids.sort(-1).values), "not the scores that the router chose by"
    return ids, scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)

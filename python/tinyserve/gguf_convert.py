"""Turns a Llama-architecture GGUF file into an ordinary Hugging Face folder: config, fp32 safetensors,
tokenizer.

Written file by file, without transformers, so the same folder loads in every transformers release:
`config.json` names the rotary base in the old way and the new, and the tokenizer class is the one all of them
know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tinyserve.errors import SetupError
from tinyserve.progress import bar

_SPECIAL_TOKEN = 3  # GGUF token type "control"
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer files of `source` into
    `folder`.

    Raises:
        SetupError: the `gguf` package is missing, or the file holds another architecture or tokenizer.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SetupError(
            f"converting the model needs the package gguf (pip install gguf): {error}"
        ) from error
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in expected.items():
        if facts.get(name) != value:
            raise SetupError(f"{source.name}: expected {name} = {value!r}, got {facts.get(name)!r}")
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = _config(facts, tied)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {name: config[name] for name in _TOKEN_IDS})
    _write_weights(reader.tensors, config, folder / "model.safetensors")
    _write_tokenizer(facts, folder)


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    rope_theta = float(facts["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.rope.dimension_count"],
        "max_position_embeddings": facts["llama.context_length"],
        # GGUF keeps 1e-5 as an fp32 number; seven digits bring back the decimal it was made from.
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _write_weights(tensors: list[Any], config: dict[str, Any], path: Path) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    weights: dict[str, np.ndarray] = {}
    for tensor in bar("converting the model", total=len(tensors), unit=" tensors", items=tensors):
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name, _, suffix = tensor.name.rpartition(".")
        if name.startswith("blk."):
            _, layer_idx, part = name.split(".")
            if part == "attn_q":
                weight = _half_split_rotary(weight, config["num_attention_heads"])
            elif part == "attn_k":
                weight = _half_split_rotary(weight, config["num_key_value_heads"])
            name = f"model.layers.{layer_idx}.{_IN_BLOCK[part]}"
        else:
            name = _TOP_LEVEL[name]
        weights[f"{name}.{suffix}"] = weight
    save_file(weights, path, metadata={"format": "pt"})


def _half_split_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps a rotary pair in neighbouring rows (2i, 2i+1), Hugging Face in rows (i, i + head_dim/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": facts["llama.context_length"],
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

"""Public models for sequences, of tokens or of sound: those of transformers."""

from __future__ import annotations

from typing import Any

from rewire.bench.zoo.public import (
    PAIRS,
    SOUND,
    SPECTROGRAMS,
    TOKENS,
    TRANSFORMERS,
    VOCABULARY,
    Public,
)


def _text(
    name: str,
    kind: str,
    *,
    data: str = TOKENS,
    width: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    inner: str = "intermediate_size",
    **more: Any,
) -> Public:
    """A transformer of four layers of 384 units, or small; ``width`` to ``inner`` are names of options."""

    def sizes(width_: int, layers_: int, heads_: int, inner_: int) -> dict[str, Any]:
        found = {width: width_, layers: layers_, heads: heads_, inner: inner_}
        found.pop("", None)
        return found

    return Public(
        *(name, TRANSFORMERS, kind, data),
        options={"vocab_size": VOCABULARY, **sizes(384, 4, 6, 1536), **more},
        small=sizes(64, 2, 4, 128),
    )


def _both(name: str, kind: str, **more: Any) -> Public:
    """An encoder and a decoder, of four layers of 384 units each, or small."""

    def sizes(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
        return {
            **{"d_model": width, "encoder_layers": layers, "decoder_layers": layers},
            **{"encoder_attention_heads": heads, "decoder_attention_heads": heads},
            **{"encoder_ffn_dim": inner, "decoder_ffn_dim": inner},
        }

    options = {"vocab_size": VOCABULARY, **sizes(384, 4, 6, 1536), **_SPECIAL, **more}
    return Public(name, TRANSFORMERS, kind, PAIRS, options=options, small=sizes(64, 2, 4, 128))


_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_POSITIONS: dict[str, Any] = {"max_position_embeddings": 128}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}  # heads that share their keys and values
_GPT: dict[str, Any] = {
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "inner": "n_inner",
}

LANGUAGE = (
    _text("bert", "BertForSequenceClassification", **_POSITIONS),
    _text("llama", "LlamaForCausalLM", **_POSITIONS, intermediate_size=1024),
    _text("gpt2", "GPT2LMHeadModel", **_GPT, **_SPECIAL, n_positions=128),
    _text(
        "t5",
        "T5ForConditionalGeneration",
        data=PAIRS,
        width="d_model",
        layers="num_layers",
        heads="num_heads",
        inner="d_ff",
        decoder_start_token_id=0,
    ),
    _text("mamba", "MambaForCausalLM", heads="", inner="", state_size=8),
    _text(
        "rwkv", "RwkvForCausalLM", heads="", inner="", attention_hidden_size=None, use_cache=False
    ),
    _text("falcon", "FalconForCausalLM", inner=""),
    _text("roberta", "RobertaForSequenceClassification", max_position_embeddings=130),
    _text(
        "distilbert",
        "DistilBertForSequenceClassification",
        width="dim",
        layers="n_layers",
        heads="n_heads",
        inner="hidden_dim",
        **_POSITIONS,
    ),
    _text("albert", "AlbertForSequenceClassification", embedding_size=64, **_POSITIONS),
    _text("electra", "ElectraForSequenceClassification", embedding_size=64, **_POSITIONS),
    _text("deberta", "DebertaForSequenceClassification", **_POSITIONS),
    _text("deberta_v2", "DebertaV2ForSequenceClassification", **_POSITIONS),
    _text("mpnet", "MPNetForSequenceClassification", max_position_embeddings=130),
    _text(
        "modernbert",
        "ModernBertForSequenceClassification",
        **_POSITIONS,
        **_SPECIAL,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _text(
        "xlnet",
        "XLNetForSequenceClassification",
        width="d_model",
        layers="n_layer",
        heads="n_head",
        inner="d_inner",
    ),
    _text(
        "gpt_neo",
        "GPTNeoForCausalLM",
        heads="num_heads",
        layers="num_layers",
        **_POSITIONS,
        attention_types=[[["global", "local"], 1]],
    ),
    _text("gpt_neox", "GPTNeoXForCausalLM", **_POSITIONS),
    _text("gptj", "GPTJForCausalLM", **_GPT, n_positions=128, rotary_dim=8),
    _text("opt", "OPTForCausalLM", inner="ffn_dim", word_embed_proj_dim=64, **_POSITIONS),
    _text("bloom", "BloomForCausalLM", layers="n_layer", heads="n_head", inner=""),
    _text("mistral", "MistralForCausalLM", **_POSITIONS, **_GROUPED),
    _text(
        "mixtral",
        "MixtralForCausalLM",
        **_POSITIONS,
        **_GROUPED,
        num_local_experts=4,
        experts_implementation="eager",
    ),
    _text("qwen2", "Qwen2ForCausalLM", **_POSITIONS, **_GROUPED),
    _text("qwen3", "Qwen3ForCausalLM", **_POSITIONS, **_GROUPED, head_dim=16),
    _text("gemma", "GemmaForCausalLM", **_POSITIONS, **_GROUPED, head_dim=16),
    _text("gemma2", "Gemma2ForCausalLM", **_POSITIONS, **_GROUPED, head_dim=16),
    _text("phi", "PhiForCausalLM", **_POSITIONS),
    _text("phi3", "Phi3ForCausalLM", **_POSITIONS, **_SPECIAL),
    _text("stablelm", "StableLmForCausalLM", **_POSITIONS, num_key_value_heads=2),
    _text("olmo", "OlmoForCausalLM", **_POSITIONS, **_GROUPED, **_SPECIAL),
    _text("starcoder2", "Starcoder2ForCausalLM", **_POSITIONS, **_GROUPED),
    _both("bart", "BartForConditionalGeneration", **_POSITIONS),
    _both("pegasus", "PegasusForConditionalGeneration", **_POSITIONS),
    _both("marian", "MarianMTModel", **_POSITIONS, decoder_start_token_id=0),
    _text(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        data=SOUND,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    Public(
        *("whisper", TRANSFORMERS, "WhisperForConditionalGeneration", SPECTROGRAMS),
        options={
            **_both("", "").options,
            **{"num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 128},
            **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        },
        small=_both("", "").small,
    ),
)

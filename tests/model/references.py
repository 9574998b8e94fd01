"""What the model's parts are tested against: the Mamba-2 recurrence, a token at a time, and small models."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


SCALINGS = {
    "logits_scaling": 3.0, "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
}  # fmt: skip
"""What Granite multiplies and divides by; each differs from 1, which would hide that it is left out."""

OF_TYPE = {
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
}
"""The types of Granite without Mamba-2 layers: dense (3.x, 4.0, 4.1, 4.2), with experts, and with sliding windows."""

WINDOWS = {
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "layer_rope_theta": [10_000.0, 0.0, 500_000.0, 10_000.0],  # 0: a layer without positions
}


def granite(kind: str = "granite", **changed):
    """A Granite with random weights, of four layers where some have a window and of one elsewhere."""
    torch.manual_seed(0)
    windows = WINDOWS | {"num_hidden_layers": 4} if kind.endswith("swa") else {}
    config = AutoConfig.for_model(kind, **SIZES | HEADS | SCALINGS | OF_TYPE[kind] | windows | changed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # 0 at first
            torch.nn.init.normal_(parameter)
    return model


def llama():
    return of_type("llama")


def of_type(kind: str):
    """A model of a type that is no Granite, with random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **HEADS, head_dim=8))


def write_gguf(path, tokenizer, model):
    """A llama and its byte-level tokenizer as a GGUF file; matrices in Q8_0, so their rows are multiples of 32."""
    import gguf

    config, vocabulary = model.config, tokenizer.get_vocab()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens, special = sorted(vocabulary, key=vocabulary.get), set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if each in special else gguf.TokenType.NORMAL for each in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp turns pairs of neighbours where transformers turns halves
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values = tensor.float().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        place = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(place, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recurrence(x, dt, a, b, c, d, first=None):
    """H_t = exp(dt_t A) H_{t-1} + dt_t x_t B_t^T; y_t = H_t C_t + D x_t. ``first``: a document's first tokens."""
    batch, time, heads, head_dim = x.shape
    b, c = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (b, c))
    state, outputs = x.new_zeros(batch, heads, head_dim, b.shape[-1]), []
    for t in range(time):
        step = dt[:, t, :, None, None]
        state = state if first is None else state.masked_fill(first[:, t, None, None, None], 0)
        state = (step * a[:, None, None]).exp() * state + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        outputs.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, 1)

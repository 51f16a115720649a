"""Models of OpenSeq2Seq that write text for text (`Text2Text`), as settings of the recipe `translation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openseq2seq_config import ParameterRefused, check_all_known, plain

Values = dict[str, Any]
MODEL = "Text2Text"
USED_PARAMS = tuple(name + end for name in ("data_layer", "encoder", "decoder", "loss") for end in ("", "_params"))
NETWORKS = {"TransformerEncoder": "transformer", "BidirectionalRNNEncoderWithEmbedding": "lstm"}
# fmt: off
ENCODER = {
    "encoder_layers": "encoder_layers", "hidden_size": "width", "num_heads": "heads", "filter_size": "ffn_width",
    "attention_dropout": "attention_dropout", "relu_dropout": "activation_dropout",
    "layer_postprocess_dropout": "dropout",
}
DECODER = {
    "num_hidden_layers": "decoder_layers", "decoder_layers": "decoder_layers", "beam_size": "beam",
    "beam_width": "beam", "alpha": "length_penalty", "length_penalty": "length_penalty",
}
ENCODER_OTHERS = [
    "core_cell", "core_cell_params", "encoder_dp_input_keep_prob", "encoder_dp_output_keep_prob",
    "encoder_use_skip_connections", "src_emb_size", "remove_padding", "regularizer", "initializer", "dtype",
    "pad_embeddings_2_eight",
]
DECODER_OTHERS = [
    *ENCODER, "core_cell", "core_cell_params", "decoder_dp_input_keep_prob", "decoder_dp_output_keep_prob",
    "decoder_use_skip_connections", "tgt_emb_size", "attention_type", "luong_scale", "attention_layer_size",
    "extra_decode_length", "EOS_ID", "GO_SYMBOL", "END_SYMBOL", "PAD_SYMBOL", "bahdanau_normalize", "dtype",
]
DATA = [
    "source_file", "target_file", "src_vocab_file", "tgt_vocab_file", "delimiter", "shuffle", "repeat", "max_length",
    "pad_vocab_to_eight", "pad_lengths_to_eight", "pad_data_to_eight", "map_parallel_calls", "prefetch_buffer_size",
]
# fmt: on
LOSS = ["label_smoothing", "batch_size", "tgt_vocab_size", "offset_target_by_one", "average_across_timestep", "do_mask"]


def is_text_model(model: Any) -> bool:
    return plain(model) == MODEL


def text_settings(train: Mapping[str, Any], evaluate: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Settings of model and data, and what is to be said of them."""
    encoder, decoder, loss = (train.get(f"{part}_params") or {} for part in ("encoder", "decoder", "loss"))
    data, val = (params.get("data_layer_params") or {} for params in (train, evaluate))
    check_all_known(
        [
            ("encoder_params/", encoder, [*ENCODER, *ENCODER_OTHERS]),
            ("decoder_params/", decoder, [*DECODER, *DECODER_OTHERS]),
            ("loss_params/", loss, LOSS),
            ("data_layer_params/", data, DATA),
        ]
    )
    name = plain(train.get("encoder", ""))
    if name not in NETWORKS:
        raise ParameterRefused(f"`encoder` {name or 'is missing'}: is not translated", f"{', '.join(NETWORKS)} are")
    values: Values = {
        "warmup_steps": 0,
        "model": NETWORKS[name],
        "share": "all",
        "tokens": "words",
        "vocabulary": 65536,
    }
    values |= {ENCODER[key]: value for key, value in encoder.items() if key in ENCODER}
    values |= {DECODER[key]: value for key, value in decoder.items() if key in DECODER}
    words = [f"`decoder_params/{key}` {decoder[key]} is not {encoder[key]}: both sides have the encoder's here"
             for key in ENCODER if key in decoder and key in encoder and decoder[key] != encoder[key]]  # fmt: skip
    if values["model"] == "lstm":
        units = encoder.get("core_cell_params", {}).get("num_units")
        values |= {"width": units} if units else {}
        values["dropout"] = round(1.0 - encoder.get("encoder_dp_input_keep_prob", 1.0), 6)
    smooths = plain(train.get("loss", "")).endswith("WithSmoothing")
    values["label_smoothing"] = loss.get("label_smoothing", 0.1 if smooths else 0.0)
    values |= _files("train", data) | (_files("val", val) if val else {})
    values["order"] = "random" if data.get("shuffle") else "none"
    if data.get("max_length"):
        values["max_tokens"] = data["max_length"]
    vocabularies = [f"`{key}`" for key in ("src_vocab_file", "tgt_vocab_file") if key in data]
    if vocabularies:
        words.append(
            f"{' and '.join(vocabularies)} not read: units are what stands between spaces in the training text"
        )
    return values, words


def text_to_infer(infer: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The file whose lines are translated, and options of the search."""
    data, decoder = infer.get("data_layer_params") or {}, infer.get("decoder_params") or {}
    source = _files("val", data)["val_source"]
    options = {DECODER[key]: value for key, value in decoder.items() if DECODER.get(key) in ("beam", "length_penalty")}
    return source, [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def _files(part: str, data: Mapping[str, Any]) -> Values:
    for key in ("source_file", "target_file"):
        if key not in data:
            raise ParameterRefused(f"`data_layer_params/{key}` is missing", "OpenSeq2Seq, too, needs it")
    return {f"{part}_source": data["source_file"], f"{part}_target": data["target_file"]}

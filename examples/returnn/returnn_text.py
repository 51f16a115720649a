"""Configs of RETURNN that translate, as settings of the recipe `translation`: text files, and what a network says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from returnn_mistakes import OptionRefused, number

Values = dict[str, Any]
USED = ("train", "dev", "eval", "eval_datasets", "network", "max_seq_length")
CLASS = "TranslationDataset"
HEEDED = ("class", "path", "file_postfix", "seq_ordering", "partition_epoch")


def text_settings(config: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Settings of model and data, and what is to be said of them."""
    if "train" not in config:
        raise OptionRefused(
            "`train` is missing", f'train = {{"class": "{CLASS}", "path": "data", "file_postfix": "train"}}'
        )
    values: Values = dict(zip(("train_source", "train_target"), _files("train", config["train"]), strict=True))
    named = {name: config[name] for name in ("dev", "eval") if name in config} | config.get("eval_datasets", {})
    sets = {name: _files(name, options) for name, options in named.items()}
    if sets:
        values["val_source"] = tuple(f"{name}={source}" for name, (source, _) in sets.items())
        values["val_target"] = tuple(target for _, target in sets.values())
        values["monitor"] = f"{next(iter(sets))}/loss"  # which is what newbob follows there
    values["warmup_steps"] = 0
    if number(config, "max_seq_length", 0) > 0:
        values["max_tokens"] = config["max_seq_length"]
    values["tokens"], values["vocabulary"] = "words", 65536  # its files have their units between spaces
    words = [
        f"no effect here: `{name}/{key}`"
        for name, options in {"train": config["train"], **named}.items()
        for key in options
        if key not in HEEDED
    ]
    return values | _network(config.get("network") or {}), words


def _files(name: str, options: Any) -> tuple[str, str]:
    """The two files of a data set; with .gz where they are so."""
    if not isinstance(options, Mapping) or options.get("class") != CLASS:
        raise OptionRefused(
            f"`{name}` is no {CLASS}", f'{name} = {{"class": "{CLASS}", "path": ..., "file_postfix": ...}}'
        )
    missing = [key for key in ("path", "file_postfix") if key not in options]
    if missing:
        raise OptionRefused(f"`{name}/{missing[0]}` is missing")
    found = []
    for side in ("source", "target"):
        plain = Path(options["path"]) / f"{side}.{options['file_postfix']}"
        packed = plain.with_name(plain.name + ".gz")
        found.append(str(packed if packed.exists() or not plain.exists() else plain))
    return found[0], found[1]


def _network(network: Mapping[str, Any]) -> Values:
    """What a network of LSTM layers and attention says: their number and width, dropout, label smoothing, the beam."""
    if not network:
        return {}
    forwards = [
        layer for layer in network.values() if layer.get("class") == "rec" and layer.get("direction") == 1
    ]  # each has a partner that reads backwards
    if not forwards:
        raise OptionRefused(
            "`network` has no LSTM layers that read forwards",
            "take it out: `model` and `size` of ours choose a network",
        )
    values: Values = {"model": "lstm", "encoder_layers": len(forwards), "decoder_layers": 1}
    values["width"] = forwards[0].get("n_out", 1000)
    for layer in _layers(network):
        if layer.get("class") == "choice" and isinstance(layer.get("beam_size"), int):
            values["beam"] = layer["beam_size"]
        if layer.get("class") == "softmax":
            values["label_smoothing"] = (layer.get("loss_opts") or {}).get("label_smoothing", 0.0)
            values["dropout"] = layer.get("dropout", 0.0)
    return values


def _layers(network: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All layers, also those of a decoder that is a network of its own."""
    for layer in network.values():
        if isinstance(layer, Mapping):
            yield layer
            unit = layer.get("unit")
            if isinstance(unit, Mapping):
                yield from _layers(unit)

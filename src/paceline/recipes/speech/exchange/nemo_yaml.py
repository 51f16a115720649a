"""NeMo's ways of writing a network in YAML, brought to ours, and ours brought to those of its archives.

NeMo 0.x names sections for classes (`JasperEncoder`), 1.x for roles (`encoder`), perhaps inside of `model` and with
arguments inside of `params`; a few 0.11 files put all into `init_params`. What a section says about the network is
translated or refused by name, never dropped; sections about data and optimizers are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config.problems import Problem, nearest
from paceline.core.units import counted, plural
from paceline.recipes.speech.exchange.document import Document, Location

_ANY = object()
"""A value that makes no difference to the network."""

# Key -> our name, or the only value that is supported.
_BLOCK = {
    name: name
    for name in (
        "filters",
        "repeat",
        "kernel",
        "stride",
        "dilation",
        "dropout",
        "residual",
        "residual_dense",
        "separable",
        "groups",
        "se",
        "se_reduction_ratio",
    )
}
_BLOCK_ONLY: dict[str, Any] = {
    "heads": -1,
    "tied": False,
    "kernel_size_factor": 1.0,
    "residual_mode": "add",
    "se_context_size": -1,
    "se_interpolation_mode": _ANY,  # of a context that is not the whole utterance
    "stride_last": _ANY,  # without a stride, or with repeat 1, it says nothing
    "future_context": -1,
}
_ENCODER = {"activation": "activation", "conv_mask": "conv_mask", "init_mode": "init_mode"}
_ENCODER_ONLY: dict[str, Any] = {
    "normalization_mode": "batch",
    "norm_groups": _ANY,  # of group norm
    "residual_mode": "add",
    "frame_splicing": 1,
    "quantize": False,
    "jasper": _ANY,
    "feat_in": _ANY,
}
_CONFORMER = {
    name: name
    for name in (
        "d_model",
        "n_layers",
        "n_heads",
        "subsampling",
        "subsampling_factor",
        "subsampling_conv_channels",
        "causal_downsampling",
        "ff_expansion_factor",
        "self_attention_model",
        "att_context_size",
        "att_context_probs",
        "att_context_style",
        "xscaling",
        "untie_biases",
        "conv_kernel_size",
        "conv_norm_type",
        "conv_context_size",
        "use_bias",
        "dropout",
        "dropout_pre_encoder",
        "dropout_emb",
        "dropout_att",
        "stochastic_depth_drop_prob",
        "stochastic_depth_mode",
        "stochastic_depth_start_layer",
    )
}
_CONFORMER_ONLY: dict[str, Any] = {
    "feat_in": _ANY,
    "feat_out": -1,
    "reduction": None,
    "reduction_position": _ANY,  # of a reduction
    "reduction_factor": _ANY,
    "conv_dual_mode": False,
    "global_tokens": 0,
    "global_tokens_spacing": _ANY,  # of global tokens
    "global_attn_separate": _ANY,
    "pos_emb_max_len": _ANY,  # positions are computed for any length
    "subsampling_conv_chunking_factor": _ANY,  # other ways to the same numbers
    "use_pytorch_sdpa": _ANY,
    "use_pytorch_sdpa_backends": _ANY,
    "sync_max_audio_length": _ANY,
}
_PREDICTION = {"pred_hidden": "pred_hidden", "pred_rnn_layers": "pred_rnn_layers", "dropout": "pred_dropout"}
_PREDICTION_ONLY: dict[str, Any] = {
    "rnn_hidden_size": -1,
    "t_max": _ANY,  # of weights at the start
    "forget_gate_bias": _ANY,
    "weights_init_scale": _ANY,
    "hidden_hidden_bias_scale": _ANY,
}
_PREDICTION_AROUND: dict[str, Any] = {
    "prednet": _ANY,
    "normalization_mode": None,
    "random_state_sampling": False,
    "blank_as_pad": True,
    "vocab_size": _ANY,
}
_JOINT = {"joint_hidden": "joint_hidden", "activation": "joint_activation", "dropout": "joint_dropout"}
_JOINT_ONLY: dict[str, Any] = {"encoder_hidden": _ANY, "pred_hidden": _ANY}  # those of the other sections
_JOINT_AROUND: dict[str, Any] = {
    "jointnet": _ANY,
    "num_classes": _ANY,
    "vocabulary": _ANY,
    "num_extra_outputs": 0,
    "masking_prob": -1,
    "log_softmax": _ANY,  # ways to the same numbers
    "preserve_memory": _ANY,
    "fuse_loss_wer": _ANY,
    "experimental_fuse_loss_wer": _ANY,
    "fused_batch_size": _ANY,
}
_TRANSDUCER_LOSSES = ("default", "warprnnt", "warprnnt_numba", "pytorch", "graph_rnnt")
_FEATURES = {
    "features": "num_mels",
    "window_size": "window_s",
    "window_stride": "stride_s",
    "window": "window",
    "n_fft": "n_fft",
    "preemph": "preemphasis",
    "dither": "dither",
    "mag_power": "mag_power",
    "log_zero_guard_value": "log_guard",
    "log_zero_guard_type": "log_guard_type",
    "n_window_size": "window_samples",
    "n_window_stride": "stride_samples",
    "normalize": "normalize",
    "lowfreq": "low_hz",
    "highfreq": "high_hz",
    "pad_to": "pad_to",
}
_FEATURES_ONLY: dict[str, Any] = {
    "feat_type": "logfbank",
    "log": True,
    "frame_splicing": 1,
    "exact_pad": False,
    "stft_exact_pad": False,
    "pad_value": 0,
    "pre_pad": 0,
    "nb_augmentation_prob": 0,
    "mel_norm": "slaney",
    "sample_rate": _ANY,
    "stft_conv": _ANY,  # another way to the same numbers
    "use_grads": _ANY,
    "nb_max_freq": _ANY,
    "rng": _ANY,
    "int_values": _ANY,
    "max_duration": _ANY,  # of `pad_to: max`
    "use_torchaudio": False,
}
_AUGMENT = {
    name: name
    for name in ("freq_masks", "time_masks", "freq_width", "time_width", "rect_masks", "rect_time", "rect_freq")
}
_AUGMENT_ONLY: dict[str, Any] = {
    "mask_value": 0,
    "rng": _ANY,
    "use_numba_spec_augment": _ANY,
    "use_vectorized_code": _ANY,
}
# What an absent value means there, in our words.
_ABSENT: dict[str, Any] = {"preemphasis": 0.0, "normalize": "none", "window": "ones", "pad_to": 0}
_GUARDS = {"tiny": torch.finfo(torch.float32).tiny, "eps": torch.finfo(torch.float32).eps}
_CLASSES = {
    "encoder": ("ConvASREncoder", "JasperEncoder"),
    "conformer": ("ConformerEncoder",),
    "preprocessor": ("AudioToMelSpectrogramPreprocessor", "AudioPreprocessing"),
    "spec_augment": ("SpectrogramAugmentation",),
    "decoder": ("ConvASRDecoder", "JasperDecoderForCTC"),
    "prediction": ("RNNTDecoder",),
    "joint": ("RNNTJoint",),
}
_UNREAD = (
    "AudioToTextDataLayer",
    "train_ds",
    "validation_ds",
    "test_ds",
    "optim",
    "trainer",
    "exp_manager",
    "tokenizer",
    "interctc",
    "aux_ctc",
    "loss",
)
_HEADS = ("_target_", "cls", "header", "params", "init_params")
_INTERPOLATION = re.compile(r"\$\{([\w.-]+)\}")
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_PRE_RELEASE = re.compile(r"\d(a|b|rc)\d*")
MAX_HOPS = 20
"""Interpolations may point to interpolations, but not in a circle."""
MAX_INTERPOLATIONS = 10_000
"""A list of interpolations of lists of interpolations can stand for any number of values."""


@dataclass
class Translated:
    """A network in our words, and where each part stands in the document."""

    values: dict[str, Any]
    origins: dict[Location, Location] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, location: Location) -> Location:
        """Return the place of a value of ours in the document; in our own form it is the same place."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.origins:
                return (*self.origins[location[:end]], *location[end:])
        return () if self.origins else location


def is_nemo(value: Mapping[str, Any]) -> bool:
    """Return True if a document is in one of NeMo's forms."""
    return bool(_places(value))


def translate(document: Document) -> Translated:
    """Bring a document for which `is_nemo` holds to our form."""
    return _Translator(document).translate()


def max_seconds(value: Mapping[str, Any]) -> float | None:
    """Return the length of the longest training utterance that a NeMo file asks for, None if it asks for none."""
    data = _mapping(value.get("AudioToTextDataLayer")) or _mapping(_mapping(value.get("model", value)).get("train_ds"))
    longest = _mapping(data.get("train")).get("max_duration", data.get("max_duration"))
    return float(longest) if isinstance(longest, int | float) else None


def front_end_of(version: str) -> str | None:
    """Return the front end of a version of NeMo, such as 1.20.0 or 2.5.0rc0; None where it is no version."""
    match = _VERSION.match(version)
    if match is None:
        return None
    major, minor = int(match[1]), int(match[2])
    if major == 0 or ((major, minor) == (1, 0) and _PRE_RELEASE.search(version)):
        return "nemo-0.11"
    return "nemo-1.0" if (major, minor) < (2, 5) else "nemo-2.5"


VERSIONS = {"nemo-0.11": "0.11.0", "nemo-1.0": "1.23.0", "nemo-2.5": "2.5.0"}
"""A version of NeMo that hears as each front end does."""
_CLASS_PLACES = {
    "preprocessor": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "spec_augment": "nemo.collections.asr.modules.SpectrogramAugmentation",
    "blocks": "nemo.collections.asr.modules.ConvASREncoder",
    "conformer": "nemo.collections.asr.modules.ConformerEncoder",
    "decoder": "nemo.collections.asr.modules.ConvASRDecoder",
    "prediction": "nemo.collections.asr.modules.RNNTDecoder",
    "joint": "nemo.collections.asr.modules.RNNTJoint",
}
_MODEL_PLACES = {
    "ctc": ("ctc_models.EncDecCTCModel", "ctc_bpe_models.EncDecCTCModelBPE"),
    "transducer": ("rnnt_models.EncDecRNNTModel", "rnnt_bpe_models.EncDecRNNTBPEModel"),
    "hybrid": (
        "hybrid_rnnt_ctc_models.EncDecHybridRNNTCTCModel",
        "hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
    ),
}
"""Classes for characters and for subwords."""


def nemo_config(network: Mapping[str, Any], front_end: str, tokenizer: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the `model_config.yaml` of an archive, from a network's settings as plain values.

    `tokenizer` is that section's content; None for characters.
    """
    labels, rate, trim = list(network["labels"]), network["sample_rate"], network.get("trim_silence", "no")
    transducer = network.get("transducer")
    encoder, width = _encoder_config(network)
    of_ctc = {"_target_": _CLASS_PLACES["decoder"], "feat_in": width, "num_classes": len(labels), "vocabulary": labels}
    head = "ctc" if transducer is None else "hybrid" if transducer["ctc"] else "transducer"
    place = _MODEL_PLACES[head][0 if tokenizer is None else 1]
    config: dict[str, Any] = {
        "target": f"nemo.collections.asr.models.{place}",
        "nemo_version": VERSIONS[front_end],
        "sample_rate": rate,
        "train_ds": {"trim_silence": trim != "no", "sample_rate": rate},
        "validation_ds": {"trim_silence": trim == "all", "sample_rate": rate},
        "preprocessor": {"_target_": _CLASS_PLACES["preprocessor"], "sample_rate": rate}
        | _features_config(network["features"]),
        "spec_augment": {"_target_": _CLASS_PLACES["spec_augment"]} | _masks_config(network["spec_augment"]),
        "encoder": encoder,
        **({"decoder": of_ctc} if transducer is None else _transducer_config(transducer, of_ctc)),
    }
    return config | ({"labels": labels} if tokenizer is None else {"tokenizer": dict(tokenizer)})


def _features_config(features: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: features[ours] for name, ours in _FEATURES.items() if features.get(ours) is not None}
    absent = {name: None for name in ("preemph", "window", "normalize") if config[name] == _ABSENT[_FEATURES[name]]}
    return config | absent


def _masks_config(masks: Mapping[str, Any]) -> dict[str, Any]:
    # NeMo takes every number that is not a whole one for a share
    width = masks["time_width"]
    return {**masks, "time_width": int(width) if width >= 1 else width}


def _encoder_config(network: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the section of the encoder, and the width of its output."""
    conformer, mels = network.get("conformer"), network["features"]["num_mels"]
    if conformer is None:
        lists = ("kernel", "stride", "dilation")
        blocks = [
            {name: [block[name]] if name in lists else block[name] for name in _BLOCK} for block in network["blocks"]
        ]
        encoder = {name: network[name] for name in _ENCODER}
        section = {"_target_": _CLASS_PLACES["blocks"], "feat_in": mels, **encoder, "jasper": blocks}
        return section, network["blocks"][-1]["filters"]
    encoder = {name: conformer[name] for name in _CONFORMER}
    contexts = conformer["att_context_size"]
    encoder["att_context_size"] = contexts[0] if len(contexts) == 1 else contexts
    encoder["att_context_probs"] = conformer["att_context_probs"] or None
    return {"_target_": _CLASS_PLACES["conformer"], "feat_in": mels, **encoder}, conformer["d_model"]


def _transducer_config(transducer: Mapping[str, Any], of_ctc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a transducer, and of the CTC decoder of a hybrid; `of_ctc` is what that would be."""
    predicted, labels = transducer["pred_hidden"], of_ctc["vocabulary"]
    config: dict[str, Any] = {
        "model_defaults": {
            "enc_hidden": of_ctc["feat_in"],
            "pred_hidden": predicted,
            "joint_hidden": transducer["joint_hidden"],
        },
        "decoder": {
            "_target_": _CLASS_PLACES["prediction"],
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "vocab_size": len(labels),
            "prednet": {name: transducer[ours] for name, ours in _PREDICTION.items()},
        },
        "joint": {
            "_target_": _CLASS_PLACES["joint"],
            "log_softmax": None,
            "num_classes": len(labels),
            "vocabulary": labels,
            "jointnet": {
                **{name: transducer[ours] for name, ours in _JOINT.items()},
                "encoder_hidden": of_ctc["feat_in"],
                "pred_hidden": predicted,
            },
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}},
        "loss": {"loss_name": "default"},
    }
    if transducer["ctc"]:
        config["aux_ctc"] = {"ctc_loss_weight": 0.3, "decoder": dict(of_ctc), "decoding": {"strategy": "greedy"}}
    return config


def unread(value: Mapping[str, Any]) -> list[str]:
    """Return the sections of a NeMo file that are not read, with the names in them: of data, optimizer and trainer."""
    model = _mapping(value.get("model"))
    inside = {f"model.{name}": model[name] for name in _UNREAD if name in model}
    sections = {name: value[name] for name in _UNREAD if name in value} | inside
    lines = []
    for name, section in sections.items():
        keys = [str(key) for key in _mapping(section) if key != "trim_silence"]
        if keys or not isinstance(section, Mapping):
            lines.append(f"{name} ({', '.join(keys)})" if keys else name)
    return lines


class _Translator:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.places = _places(document.value)
        self.done = Translated({})
        self._num_interpolations = 0

    def translate(self) -> Translated:
        features = self._section("preprocessor", _FEATURES, _FEATURES_ONLY, ("features",))
        features = {name: _ABSENT.get(name) if value is None else value for name, value in features.items()}
        features["log_guard"] = _GUARDS.get(str(features.get("log_guard")), features.get("log_guard"))
        if features.get("normalize") == "NA":  # of streaming models: nothing is done
            features["normalize"] = "none"
        features = self._in_seconds(features)
        self.done.values["features"] = {name: value for name, value in features.items() if name != "log_guard" or value}
        self._front_end()
        self.done.values["spec_augment"] = self._section("spec_augment", _AUGMENT, _AUGMENT_ONLY, ("spec_augment",))
        if "conformer" in self.places:
            self.done.values["conformer"] = self._section("conformer", _CONFORMER, _CONFORMER_ONLY, ("conformer",))
        else:
            self.done.values |= self._section("encoder", _ENCODER, _ENCODER_ONLY, ())
            self._blocks()
        if "joint" in self.places:
            self._transducer()
        self._labels()
        self._sample_rate()
        self._trim_silence()
        return self.done

    def _in_seconds(self, features: dict[str, Any]) -> dict[str, Any]:
        """A window or stride may be given in samples instead; both at once are refused, as NeMo does."""
        seconds = dict(features)
        rate = self._rate()
        for samples, ours in (("window_samples", "window_s"), ("stride_samples", "stride_s")):
            number = seconds.pop(samples, None)
            if number is None:
                continue
            place = self.done.origins.pop(("features", samples))
            if seconds.get(ours) is not None:
                self._refuse(place, f"but `{self.done.origins[('features', ours)][-1]}` is set, too", str(number))
            elif not isinstance(number, int) or number <= 0 or not isinstance(rate, int) or rate <= 0:
                self._refuse(place, "must be a number of samples, at a sample rate that is known", str(number))
            else:
                seconds[ours] = number / rate
        return {name: value for name, value in seconds.items() if name not in ("window_s", "stride_s") or value}

    def _rate(self) -> Any:
        places: list[Location] = [("sample_rate",), ("model", "sample_rate")]
        places += [(*self.places["preprocessor"], "sample_rate")] if "preprocessor" in self.places else []
        return next((rate for place in places if (rate := self._get(place)) is not None), 16000)

    def _front_end(self) -> None:
        """The version that wrote the file says how many frames there are; a file without one is left as it was read
        before versions were known: NeMo wrote none before 1.7, and none into examples."""
        for place in (("nemo_version",), ("model", "nemo_version")):
            version = self._get(place)
            if version is not None:
                front_end = front_end_of(str(version))
                if front_end is None:
                    self._refuse(place, "is no version of NeMo", str(version))
                else:
                    self.done.values["features"]["front_end"] = front_end
                    self.done.origins[("features", "front_end")] = place
                return

    def _section(self, role: str, names: Mapping[str, str], only: Mapping[str, Any], ours: Location) -> dict[str, Any]:
        place = self.places.get(role)
        if ours:
            self.done.origins[ours] = place or ()
        section = self._get(place) if place is not None else None
        if section is None:
            return {}
        assert place is not None
        if not isinstance(section, Mapping):
            self._refuse(place, "must hold lines of the form `name: value`")
            return {}
        self._check_class(role, place)
        return self._take(section, place, names, only, ours)

    def _take(
        self,
        section: Mapping[str, Any],
        place: Location,
        names: Mapping[str, str],
        only: Mapping[str, Any],
        ours: Location,
    ) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        for key in section:
            here = (*place, key)
            if key in names:
                taken[names[key]] = self._get(here)
                self.done.origins[(*ours, names[key])] = here
            elif key in only:
                value = self._get(here)
                if only[key] is not _ANY and not _is_same(value, only[key]):
                    right = "null" if only[key] is None else str(only[key]).lower()
                    self._refuse(here, f"is not supported; only {right} is", str(value))
            elif key not in _HEADS:
                meant = nearest(str(key), [*names, *only])
                hint = f"did you mean {meant}?" if meant else "take the line out if it does not matter to the network"
                self._refuse(here, "is not known here, so it cannot be left out silently", hint=hint)
        return taken

    def _blocks(self) -> None:
        place = (*self.places["encoder"], "jasper")
        self.done.origins[("blocks",)] = place
        listed = self._get(place)
        if not isinstance(listed, list):
            self._refuse(place, "must be a list of blocks")
            return
        blocks: list[Any] = []
        for index, block in enumerate(listed):
            if isinstance(block, Mapping):
                taken = self._take(block, (*place, index), _BLOCK, _BLOCK_ONLY, ("blocks", index))
                if taken.get("se") and "JasperEncoder" not in self.places["encoder"]:
                    taken.setdefault("se_reduction_ratio", 8)  # the default of NeMo 1.x; of 0.x and ours: 16
                blocks.append(taken)
            else:
                blocks.append(block)
        self.done.values["blocks"] = blocks

    def _transducer(self) -> None:
        """Read the prediction network and the joint network, whose sizes are in sections of their own."""
        taken: dict[str, Any] = {"ctc": "aux_ctc" in self.places}
        parts = (
            ("decoder", "prediction", "prednet", _PREDICTION, _PREDICTION_ONLY, _PREDICTION_AROUND),
            ("joint", "joint", "jointnet", _JOINT, _JOINT_ONLY, _JOINT_AROUND),
        )
        for role, kind, inner, names, only, around in parts:
            place = self.places.get(role, (role,))
            section = self._get(place)
            inside = self._get((*place, inner))
            if not isinstance(section, Mapping) or not isinstance(inside, Mapping):
                self._refuse(place, f"must be there, with `{inner}`: there is a joint network of a transducer")
                continue
            self._check_class(kind, place)
            self._take(section, place, {}, around, ("transducer",))
            taken |= self._take(inside, (*place, inner), names, only, ("transducer",))
        for name in ("pred_dropout", "joint_dropout"):
            taken[name] = taken.get(name) or 0.0  # nothing is dropped where nothing is said
        taken["joint_activation"] = str(taken.get("joint_activation", "relu")).lower()
        for place in (("loss", "loss_name"), ("model", "loss", "loss_name")):
            loss = self._get(place)
            if loss is not None and loss not in _TRANSDUCER_LOSSES:
                self._refuse(place, "is not supported; only the plain transducer loss is", str(loss))
        self.done.values["transducer"] = taken

    def _labels(self) -> None:
        role = "joint" if "joint" in self.places else "decoder"
        decoder = self._get(self.places[role]) if role in self.places else None
        places: list[Location] = []
        if isinstance(decoder, Mapping):
            if role == "decoder":
                self._check_class(role, self.places[role])
            places.append((*self.places[role], "vocabulary"))
        places += [("labels",), ("model", "labels")]
        for place in places:
            labels = self._get(place)
            if labels is not None and labels != []:  # of subwords that a tokenizer will name
                self.done.values["labels"] = labels
                self.done.origins[("labels",)] = place
                break
        classes = decoder.get("num_classes") if isinstance(decoder, Mapping) else None
        told = self.done.values.get("labels")
        if isinstance(told, list) and isinstance(classes, int) and classes > 0 and classes != len(told):
            self._refuse(
                (*self.places[role], "num_classes"),
                f"but there {plural(len(told), 'is')} {counted(len(told), 'label')}",
                str(classes),
            )

    def _sample_rate(self) -> None:
        places: list[Location] = [("sample_rate",), ("model", "sample_rate")]
        if "preprocessor" in self.places:
            places.append((*self.places["preprocessor"], "sample_rate"))
        said = {place: rate for place in places if (rate := self._get(place)) is not None}
        if len({str(rate) for rate in said.values()}) > 1:
            self._refuse(places[-1], f"but sample_rate is {next(iter(said.values()))}", str(said.get(places[-1])))
        for place, rate in list(said.items())[:1]:
            self.done.values["sample_rate"] = rate
            self.done.origins[("sample_rate",)] = place
        width = self._get((*self.places["encoder"], "feat_in"))
        mels = self.done.values["features"].get("num_mels", 64)
        if width is not None and not _is_same(width, mels):
            self._refuse((*self.places["encoder"], "feat_in"), f"but there are {mels} features", str(width))

    def _trim_silence(self) -> None:
        """Data sections are not read, but for what they do to the recordings that the network hears."""
        kinds = {"train": ("train_ds", "train"), "other": ("validation_ds", "eval")}
        said = {kind: self._said_of_data("trim_silence", *names) for kind, names in kinds.items()}
        for place, value in said.values():
            if value not in (None, True, False):
                self._refuse(place, "must be true or false", str(value))
        trains, others = (said[kind][1] is True for kind in kinds)
        if others and not trains:
            self._refuse(said["other"][0], "is not supported unless training data is trimmed, too", "true")
        if trains:
            self.done.values["trim_silence"] = "all" if others else "train"

    def _said_of_data(self, key: str, section: str, part: str) -> tuple[Location, Any]:
        """Return a value and its place: from a data section of 1.x (`model.train_ds`), from the data layer of 0.x or a
        part of it (`train`)."""
        layer = ("AudioToTextDataLayer",)
        above = [("model", section), (section,), (*layer, part), layer, (*layer, "init_params")]
        places: list[Location] = [(*place, key) for place in above]
        return next(((place, value) for place in places if (value := self._get(place)) is not None), (places[0], None))

    def _check_class(self, role: str, place: Location) -> None:
        outer = place[:-1] if place[-1] in ("params", "init_params") else place
        section = _mapping(self._get(outer))
        named = section.get("_target_") or section.get("cls") or _mapping(section.get("header")).get("full_spec")
        if isinstance(named, str) and named.rpartition(".")[2] not in _CLASSES[role]:
            self._refuse(outer, f"is of class {named.rpartition('.')[2]}; only {_CLASSES[role][0]} is supported")

    def _get(self, place: Location, hops: int = 0) -> Any:
        """The value at a place, through interpolations such as `${model.sample_rate}`; None where there is none."""
        value: Any = self.document.value
        for at, part in enumerate(place):
            if isinstance(value, str):
                value = self._resolved(value, place[:at], hops)
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list) and str(part).isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return self._resolved(value, place, hops)

    def _resolved(self, value: Any, place: Location, hops: int) -> Any:
        if isinstance(value, list):
            return [self._resolved(entry, place, hops) for entry in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _INTERPOLATION.fullmatch(value)
        self._num_interpolations += 1
        if self._num_interpolations > MAX_INTERPOLATIONS:
            self._refuse((), f"more than {MAX_INTERPOLATIONS:,} interpolations, each counted with those it points to")
            return None
        if match is not None and hops < MAX_HOPS:
            target = tuple(match[1].split("."))
            # A saved model config is what stood below `model`, with interpolations that may still name it.
            for candidate in (target, target[1:] if target[0] == "model" else ("model", *target)):
                found = self._get(candidate, hops + 1) if candidate else None
                if found is not None:
                    return found
        if hops == 0:
            self._refuse(place, "points to nothing that can be found here", value)
        return None

    def _refuse(self, place: Location, what: str, given: str = "", hint: str = "") -> None:
        problem = Problem(self.document.where(place), what, hint, given)
        if problem not in self.done.problems:
            self.done.problems.append(problem)


def _places(value: Mapping[str, Any]) -> dict[str, Location]:
    """Return the places of the arguments of each part; nothing if the document is not NeMo's."""
    if "JasperEncoder" in value:
        old = {
            "encoder": "JasperEncoder",
            "preprocessor": "AudioToMelSpectrogramPreprocessor",
            "spec_augment": "SpectrogramAugmentation",
        }
        if "AudioPreprocessing" in value:  # its name up to 0.8
            old["preprocessor"] = "AudioPreprocessing"
        return {role: _arguments(value, (name,)) for role, name in old.items() if name in value}
    roles = ("encoder", "preprocessor", "spec_augment", "decoder", "joint", "aux_ctc")
    for above, suffix in (((), ""), (("model",), ""), (("init_params",), "_params")):
        inside: Any = value
        for part in above:
            inside = _mapping(inside).get(part)
        found = {
            role: _arguments(value, (*above, role + suffix)) for role in roles if role + suffix in _mapping(inside)
        }
        encoder = _mapping(_at(value, found["encoder"])) if "encoder" in found else {}
        if "jasper" in encoder:
            return found
        if {"d_model", "n_layers"} <= encoder.keys():
            return {**found, "conformer": found["encoder"]}
    return {}


def _arguments(value: Mapping[str, Any], place: Location) -> Location:
    section = _mapping(_at(value, place))
    inner = next((name for name in ("params", "init_params") if isinstance(section.get(name), Mapping)), None)
    return (*place, inner) if inner is not None else place


def _at(value: Any, place: Location) -> Any:
    for part in place:
        value = _mapping(value).get(part)
    return value


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_same(value: Any, wanted: Any) -> bool:
    """Return True if a value, perhaps still text or alone in a list, is the wanted one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if str(value).lower() == str(wanted).lower():
        return True
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return False

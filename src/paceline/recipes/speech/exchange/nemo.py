"""Weights from and for a `.nemo` archive of a Conformer, QuartzNet or Jasper with CTC or a transducer: a tar with
`model_config.yaml`, `model_weights.ckpt` and, where it writes subwords, the files of its tokenizer.

Nothing of the archive is unpacked to a path it names, and nothing in it is executed: the configuration is read as plain
YAML, the weights with torch's loader for tensors only.
"""

from __future__ import annotations

import io
import lzma
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from torch import Tensor

from paceline.config.yaml_text import MAX_BYTES as MAX_YAML_BYTES
from paceline.config.yaml_text import NotYaml
from paceline.core.disk import replacing
from paceline.core.errors import Failed, PacelineError
from paceline.recipes.speech.exchange.document import parse
from paceline.recipes.speech.exchange.export import WeightsDiffer, check_weights
from paceline.recipes.speech.exchange.nemo_yaml import nemo_config
from paceline.recipes.speech.head import head_of
from paceline.recipes.speech.network.config import BlockSettings, NetworkInvalid, NetworkSettings, build_network
from paceline.recipes.speech.network.encoder import weight_shapes
from paceline.recipes.speech.text.pieces import WORD_START
from paceline.recipes.speech.text.subwords.tokenizer import MODEL, WORD_PIECES, Tokenizer

CONFIG = "model_config.yaml"
WEIGHTS = "model_weights.ckpt"
MAX_BYTES = {CONFIG: MAX_YAML_BYTES, WEIGHTS: 2**32}
"""Jasper 10x5 DR takes 1.3 GB."""
MAX_OTHER_BYTES = 2**34
MAX_MEMBERS = 10_000
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
# Window, filters and transform of the front end, which ours computes itself, and the spectrogram augmentation.
# Positions are computed here.
_IGNORED = re.compile(r"(preprocessor|spec_augmentation)\.|encoder\.pos_enc\.pe$")


class NotANemoArchive(PacelineError):
    """A file that does not hold a model as NeMo saves it."""

    path: Path
    why: str
    sentence = "{path}: {why}"
    hint = f"a .nemo archive of an EncDecCTCModel is a tar file with {CONFIG} and {WEIGHTS}"


def read_nemo(path: Path) -> tuple[NetworkSettings, dict[str, Tensor]]:
    """The network and its weights, with our names; every weight of the archive is used, or known to be needless."""
    with tempfile.TemporaryFile() as file:
        config = _read_members(path, file)
        network = _read_config(path, config)
        weights = _read_weights(path, file)
    is_masked = any(name.endswith(".conv.weight") for name in weights)
    names = nemo_names(network, is_masked=is_masked)
    renamed = {ours: weights[theirs] for ours, theirs in names.items() if theirs in weights}
    counters = {ours for ours in names if ours.endswith(".num_batches_tracked")}
    missing = [f"{theirs} is missing" for ours, theirs in names.items() if ours not in renamed and ours not in counters]
    used = set(names.values())
    extra = [f"{name} is not known" for name in weights if name not in used and not _IGNORED.match(name)]
    if missing or extra:
        raise WeightsDiffer(path, (*missing, *extra))
    # Counters matter to nobody here: batch norms with a momentum never read them.
    zeros = {name: torch.zeros((), dtype=torch.int64, device="cpu") for name in counters}
    renamed = zeros | renamed
    check_weights(network, renamed, path)  # before anything is copied: a view may say that it is larger than memory
    renamed = {name: tensor.to(torch.int64 if name in counters else torch.float32) for name, tensor in renamed.items()}
    for name, tensor in renamed.items():
        if not torch.isfinite(tensor).all():
            raise NotANemoArchive(path, f"{names[name]} in its {WEIGHTS} holds values that are no numbers")
    return network, renamed


def write_nemo(
    path: Path, network: NetworkSettings, weights: Mapping[str, Tensor], tokenizer: Tokenizer | None = None
) -> None:
    """Write an archive that NeMo restores, whole or not at all; a file that is there is replaced."""
    check_weights(network, weights, path)
    files: dict[str, bytes] = {}
    section, values = None, network.model_dump(mode="json")
    if tokenizer is not None:
        files = {tokenizer.file: tokenizer.content}
        section = {"dir": "", "type": "wpe", "vocab_path": f"nemo:{WORD_PIECES}"}
        if tokenizer.file == MODEL:
            section |= {"type": "bpe", "model_path": f"nemo:{MODEL}"}
            files[WORD_PIECES] = "".join(f"{_word_piece(piece)}\n" for piece in tokenizer.pieces).encode()
        else:
            values["labels"] = [line for line in tokenizer.content.decode().splitlines() if line]
    config = nemo_config(values, network.features.front_end, section)
    names = nemo_names(network, is_masked=network.conv_mask)
    theirs = {names[name]: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    stored = io.BytesIO()
    torch.save(theirs, stored)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=10_000)
    files |= {CONFIG: text.encode(), WEIGHTS: stored.getvalue()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise Failed(
            f"cannot export to {path}: {error.strerror or error}", hint="free some space or choose another file"
        ) from error


def _word_piece(piece: str) -> str:
    """Return a piece as NeMo lists it beside a SentencePiece model: `##` before those that go on with a word."""
    return piece.removeprefix(WORD_START) if piece.startswith((WORD_START, "<")) else f"##{piece}"


def read_nemo_network(path: Path) -> NetworkSettings:
    """The network of an archive, without its weights."""
    with tempfile.TemporaryFile() as nothing:
        return _read_config(path, _read_members(path, nothing, only_config=True))


def nemo_names(network: NetworkSettings, *, is_masked: bool) -> dict[str, str]:
    """Return the name in NeMo 1.x of each of our weights.

    A block's `mconv` is one flat list: convolution (two if separable), batch norm, shuffle if grouped, activation and
    dropout for each sub-block; the last one has no activation there and ends with squeeze and excite, if any. Where
    convolutions are masked, a convolution lies inside of a module as `conv`.
    """
    conv = "conv.weight" if is_masked else "weight"
    names = dict(head_of(network).nemo_names())
    names |= {name: name for name in weight_shapes(network) if name.startswith("decoder.prediction.")}
    if network.conformer is not None:  # a Conformer has NeMo's names
        return names | {name: name for name in weight_shapes(network) if name.startswith("encoder.")}
    chain = 0
    for index, block in enumerate(network.blocks):
        ours, theirs = f"encoder.blocks.{index}", f"encoder.encoder.{index}"
        names |= {f"{ours}.{a}": f"{theirs}.{b}" for a, b in _layer_names(block, conv).items()}
        chain = chain + 1 if block.residual_dense else 0
        for number in range(max(chain, 1) if block.residual else 0):
            names[f"{ours}.residuals.{number}.conv.weight"] = f"{theirs}.res.{number}.0.{conv}"
            for part in _NORM:
                names[f"{ours}.residuals.{number}.norm.{part}"] = f"{theirs}.res.{number}.1.{part}"
    return names


def _layer_names(block: BlockSettings, conv: str) -> dict[str, str]:
    names: dict[str, str] = {}
    at = 0
    for number in range(block.repeat):
        for kind in ("depthwise", "pointwise") if block.separable else ("conv",):
            names[f"layers.{number}.{kind}.weight"] = f"mconv.{at}.{conv}"
            at += 1
        names |= {f"layers.{number}.norm.{part}": f"mconv.{at}.{part}" for part in _NORM}
        at += 2 if block.groups > 1 else 1
        if number < block.repeat - 1:
            at += 2
        elif block.se:
            names[f"layers.{number}.excite.squeeze.weight"] = f"mconv.{at}.fc.0.weight"
            names[f"layers.{number}.excite.expand.weight"] = f"mconv.{at}.fc.2.weight"
    return names


def _read_members(path: Path, weights: IO[bytes], *, only_config: bool = False) -> bytes:
    """The configuration; the weights are copied into an open file without a name, unless only the former is asked
    for."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            num_bytes = 0
            for number, member in enumerate(archive):
                name = member.name.removeprefix("./")
                if number >= MAX_MEMBERS:
                    raise NotANemoArchive(path, f"it holds more than {MAX_MEMBERS} files")
                if name not in MAX_BYTES:
                    num_bytes += member.size  # which are walked over, and unpacked where the whole is compressed
                    if num_bytes > MAX_OTHER_BYTES:
                        raise NotANemoArchive(path, f"it holds more than {MAX_OTHER_BYTES:,} bytes of other files")
                    continue
                _check_member(path, member, name, is_second=name in found)
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read() if name == CONFIG else b""
                if name == CONFIG and only_config:
                    return found[CONFIG]
                if name == WEIGHTS and not only_config:
                    shutil.copyfileobj(file, weights, 2**20)
    except FileNotFoundError:
        raise NotANemoArchive(path, "there is no such file") from None
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        why = str(error).partition("\n")[0].rstrip(":")  # tarfile lists every compression that it has tried
        raise NotANemoArchive(path, f"it is no tar file, or a damaged one: {why}") from None
    except OSError as error:
        raise NotANemoArchive(path, f"it cannot be read: {error.strerror or error}") from None
    for name in MAX_BYTES:
        if name not in found:
            raise NotANemoArchive(path, f"there is no {name} in it")
    weights.seek(0)
    return found[CONFIG]


def _check_member(path: Path, member: tarfile.TarInfo, name: str, *, is_second: bool) -> None:
    if not member.isreg():
        raise NotANemoArchive(path, f"{name} in it is a link or folder, not a file")
    if member.size > MAX_BYTES[name]:
        raise NotANemoArchive(path, f"{name} in it has {member.size:,} bytes; at most {MAX_BYTES[name]:,} are read")
    if is_second:
        raise NotANemoArchive(path, f"{name} is in it twice")


def _read_config(path: Path, config: bytes) -> NetworkSettings:
    name = f"{path}/{CONFIG}"
    try:
        return build_network(parse(name, config.decode("utf-8")))
    except NotYaml as error:
        raise NetworkInvalid(name, [error.problem]) from None
    except UnicodeDecodeError:
        raise NotANemoArchive(path, f"{CONFIG} in it is not text") from None


def _check_unpacked(path: Path, file: IO[bytes]) -> None:
    """Refuse weights that are far larger than they look: torch stores them as they are, and others may compress."""
    try:
        with zipfile.ZipFile(file) as stored:
            num_bytes = sum(member.file_size for member in stored.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        num_bytes = 0  # in torch's format before 1.6, or damaged, which its loader says
    file.seek(0, 2)
    if num_bytes > 2 * file.tell():
        raise NotANemoArchive(path, f"{WEIGHTS} in it is compressed, and has {num_bytes:,} bytes when it is unpacked")
    file.seek(0)


def _read_weights(path: Path, file: IO[bytes]) -> dict[str, Tensor]:
    _check_unpacked(path, file)
    try:
        weights: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file can fail in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotANemoArchive(path, f"{WEIGHTS} in it cannot be read as tensors only: {reason}") from None
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise NotANemoArchive(path, f"{WEIGHTS} in it does not hold tensors by name")
    for name, tensor in weights.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            kind = "quantized" if tensor.is_quantized else "on no device" if tensor.is_meta else str(tensor.layout)
            kind = str(tensor.dtype) if tensor.is_complex() else kind
            raise NotANemoArchive(path, f"{name} in its {WEIGHTS} is no plain tensor, but {kind}")
    return {str(name): tensor for name, tensor in weights.items()}

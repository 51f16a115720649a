"""Weights in the forms of other programs: read for `init_from`, written by `paceline export`.

safetensors, torch's own files (weights only), folders as Hugging Face writes them, and torch.distributed.checkpoint
(DCP). Reading runs no code of what is read.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.disk import sync
from paceline.core.errors import AlreadyExists, NotInstalled, PacelineError, TaskContract, first_line

Format = Literal["safetensors", "torch", "dcp", "onnx"]
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS = ".safetensors"
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files of a Hugging Face folder that say which file has which weight."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
DCP_METADATA = ".metadata"
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Names under which training scripts keep weights beside other things; Lightning's is the first."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""Put before names by DDP, by `torch.compile` and by modules that hold a model."""
ABOUT = "export.json"
NAMES: Mapping[Format, str] = {"safetensors": "model.safetensors", "torch": "model.pt", "onnx": "model.onnx"}


class UnreadableWeights(PacelineError):
    """A file for `init_from` that cannot be read as weights."""

    path: Path
    why: str
    sentence = "--init-from {path}: {why}"
    hint = (
        "give a checkpoint, a .safetensors file, a .pt file with a state dict (`torch.save(model.state_dict(), ...)`), "
        "a Hugging Face folder, or a torch.distributed.checkpoint"
    )


def is_export(folder: Path) -> bool:
    """Return True of a folder that `paceline export` may have written, in any of its forms."""
    return any((folder / name).is_file() for name in (ABOUT, *NAMES.values()))


def is_foreign(path: Path) -> bool:
    """Return True if a path looks like weights of another program."""
    if path.is_file():
        return path.suffix in (SAFETENSORS, *TORCH_ENDINGS)
    return any((path / name).is_file() for name in (*INDICES, *SINGLE, DCP_METADATA))


def read(path: Path) -> dict[str, Tensor]:
    """Return the weights of a file or folder by name."""
    try:
        values = _unwrapped(_read_folder(path) if path.is_dir() else _read_file(path))
    except PacelineError:
        raise
    except pickle.UnpicklingError as error:
        raise UnreadableWeights(path, "it holds more than tensors, and reading it could run code") from error
    except Exception as error:  # a file of strangers may be broken in any way
        raise UnreadableWeights(path, f"it cannot be read ({first_line(error)})") from error
    weights = {name: _dense(value) for name, value in values.items() if isinstance(value, Tensor)}
    if not weights:
        raise UnreadableWeights(path, "it has no tensors by name")
    return weights


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor as weights are: with all its numbers, sparse or quantized ones, too."""
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def fitted(weights: Mapping[str, Tensor], names: set[str]) -> Mapping[str, Tensor]:
    """Return weights without a prefix that others put before all names, where that makes more of them known."""
    best = weights
    for prefix in PREFIXES:
        stripped = {name.removeprefix(prefix): value for name, value in weights.items()}
        with_prefix = {f"{prefix}{name}": value for name, value in weights.items()}
        best = max(best, stripped, with_prefix, key=lambda each: len(names & each.keys()))
    return best


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix == SAFETENSORS:
        return load_file(path)
    # Files of before torch 1.6 are no archives, and cannot be mapped.
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(loaded, Mapping):
        raise UnreadableWeights(path, f"it holds a {type(loaded).__name__}, not tensors by name")
    return loaded


def _read_folder(path: Path) -> Mapping[str, Any]:
    if (path / DCP_METADATA).is_file():
        return _read_dcp(path)
    for index in INDICES:
        if (path / index).is_file():
            files = _files_of(json.loads((path / index).read_text(encoding="utf-8")))
            return {name: value for file in files for name, value in _read_file(path / file).items()}
    return _read_file(next(path / name for name in SINGLE if (path / name).is_file()))


def _files_of(index: Any) -> list[str]:
    """Return the files that a Hugging Face index names."""
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError("its index has no `weight_map` from weights to files")
    outside = next((file for file in names.values() if Path(file).name != file), None)
    if outside is not None:
        raise ValueError(f"its index names {outside!r}, which is not a file of this folder")
    return sorted(set(names.values()))


def _read_dcp(path: Path) -> Mapping[str, Any]:
    """Return the tensors of a torch.distributed.checkpoint; everything else in it is pickled, and left alone."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with (path / DCP_METADATA).open("rb") as file:
        content = _MetadataUnpickler(file).load()
    if not isinstance(content, Metadata):
        raise ValueError(f"its {DCP_METADATA} holds a {type(content).__name__}")
    metadata: Metadata = content

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata  # torch's own would unpickle whatever is there

    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that there is one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            load(tensors, storage_reader=Reader(path), no_dist=True)
        except CheckpointException as error:  # of all ranks, of which there is one
            raise ValueError(first_line(error.failures[0][0])) from error
    places = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    nested: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *above, last = map(str, places.get(name) or (name,))
        parent = nested
        for step in above:
            parent = parent.setdefault(step, {})
        parent[last] = tensor
    return nested


_OF_METADATA = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    ]
)
"""All that the description of a torch.distributed.checkpoint is made of, besides dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the description of a torch.distributed.checkpoint, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _OF_METADATA:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of it")
        return super().find_class(module, name)


def _unwrapped(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights of what a training script may have saved with other things."""
    for name in WRAPPERS:
        if isinstance(values.get(name), Mapping):
            return _unwrapped(values[name])
    return _flat(values)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def write(
    folder: Path,
    form: Format,
    weights: Mapping[str, Tensor],
    about: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write weights into a folder, whole or not at all; `about` names their run and checkpoint, `texts` are further
    files by name."""
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
        if form == "safetensors":
            save_file(tensors, aside / NAMES[form], metadata={"format": "pt"})
        elif form == "torch":
            torch.save(tensors, aside / NAMES[form])
        else:
            _write_dcp(aside, tensors)
        for name, text in (texts or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
        _finish(aside, folder, form, about)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_onnx(
    folder: Path, model: torch.nn.Module, inputs: tuple[Any, ...], task: str, about: Mapping[str, Any]
) -> None:
    """Write a model as ONNX, of any batch size; it must be in evaluation mode."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise NotInstalled(
                f"export to ONNX needs the package {package}, which is not installed",
                hint="pip install onnx onnxscript",
            )
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shapes = tuple(
            {0: torch.export.Dim.AUTO} if isinstance(each, Tensor) and each.dim() else None for each in inputs
        )
        try:
            torch.onnx.export(model, inputs, aside / NAMES["onnx"], dynamo=True, dynamic_shapes=shapes, verbose=False)
        except Exception as error:  # whatever torch cannot turn into a graph
            raise TaskContract(
                f"the model of {task} cannot be exported to ONNX: {first_line(error)}",
                hint="give the task an `example_inputs(grain)` that returns a tuple: what its model is called with",
            ) from error
        _finish(aside, folder, "onnx", about)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_dcp(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():  # that there is one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save(dict(tensors), checkpoint_id=folder, no_dist=True)


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / ABOUT).is_file())):
        raise AlreadyExists(
            f"{folder} contains other files", hint="name a folder that does not exist yet, or an earlier export"
        )


def _finish(aside: Path, folder: Path, form: Format, about: Mapping[str, Any]) -> None:
    """Describe an export and give it its name."""
    text = json.dumps({"format": form, **about}, indent=2) + "\n"
    (aside / ABOUT).write_text(text, encoding="utf-8")
    for path in aside.iterdir():
        sync(path)
    aside.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)

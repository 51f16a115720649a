"""NeMo's own encoder, from its source alone: what it needs of the rest of NeMo for typing, logging, adapters and export
is replaced by names without content.

The source is that of an installed NeMo, or of a checkout or bare git folder named by `PACELINE_NEMO`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

READ = (
    "nemo.collections.asr.parts.submodules.causal_convs",
    "nemo.collections.asr.parts.submodules.batchnorm",
    "nemo.collections.asr.parts.submodules.subsampling",
    "nemo.collections.asr.parts.submodules.multi_head_attention",
    "nemo.collections.asr.parts.utils.regularization_utils",
    "nemo.collections.asr.parts.submodules.conformer_modules",
    "nemo.collections.asr.modules.conformer_encoder",
)
"""In the order of their imports."""


def where() -> Path | None:
    """Return the folder with NeMo's source, None if there is none."""
    named = os.environ.get("PACELINE_NEMO")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nemo")
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def text_of(folder: Path, path: str) -> str:
    """Content of a file of a checkout or of a bare git folder."""
    if (folder / path).exists():
        return (folder / path).read_text()
    shown = subprocess.run(["git", f"--git-dir={folder}", "show", f"HEAD:{path}"], capture_output=True, check=True)
    return shown.stdout.decode()


class _Nothing:
    """Stands for any class: a mixin without methods, a decorator that changes nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, function: Any) -> Any:
        return function


class _Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Layer(torch.nn.Module):
    """NeMo's base of modules, without types of inputs."""


class _Adapted:
    def is_adapter_available(self) -> bool:
        return False


class _Accessed:
    def is_access_enabled(self, guid: Any = None) -> bool:
        return False


@contextlib.contextmanager
def encoder_class(folder: Path) -> Iterator[Any]:
    """NeMo's `ConformerEncoder`; nothing of it stays importable afterwards."""
    stubs = {
        "omegaconf": {},
        "nemo.utils": {"avoid_float16_autocast_context": contextlib.nullcontext},
        "nemo.collections.asr.models.configs": {},
        "nemo.collections.asr.parts.mixins.streaming": {},
        "nemo.collections.asr.parts.utils.adapter_utils": {},
        "nemo.collections.asr.parts.utils.activations": {"Swish": torch.nn.SiLU},  # else a compiled function
        "nemo.collections.asr.parts.submodules.adapters.attention_adapter_mixin": {
            "AttentionAdapterModuleMixin": _Adapted
        },
        "nemo.collections.common.parts.utils": {"activation_registry": {}},
        "nemo.core.classes.common": {},
        "nemo.core.classes.exportable": {},
        "nemo.core.classes.mixins": {
            "AccessMixin": _Accessed,
            "adapter_mixins": SimpleNamespace(AdapterModuleMixin=_Nothing, get_registered_adapter=bool),
        },
        "nemo.core.classes.module": {"NeuralModule": _Layer},
        "nemo.core.neural_types": {},
    }
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("nemo", "omegaconf")}
    for name in saved:
        del sys.modules[name]
    try:
        for name, content in stubs.items():
            _register(name, content)
        for name in READ:
            module = _register(name, {})
            code = compile(text_of(folder, name.replace(".", "/") + ".py"), name, "exec")
            exec(code, module.__dict__)
        yield sys.modules[READ[-1]].ConformerEncoder
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("nemo", "omegaconf")]:
            del sys.modules[name]
        sys.modules.update(saved)


def _register(name: str, content: dict[str, Any]) -> ModuleType:
    parts = name.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        if above not in sys.modules:
            sys.modules[above] = _Empty(above)
    module = _Empty(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    if len(parts) > 1:
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    return module

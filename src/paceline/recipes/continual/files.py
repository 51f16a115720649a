"""Official data files under `--data-root`: located, verified by checksum, read. Nothing is downloaded."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import InvalidData, NotFound
from paceline.core.extras import imports_for
from paceline.core.units import counted

IMAGE_BYTES = 3 * 32 * 32
_SUBSET = "it needs x_train (n, 3, 32, 32) uint8, y_train (n,), x_test and y_test"


@dataclass(frozen=True)
class Labelled:
    """Examples and their labels, in memory: uint8 examples stay uint8."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def select(self, chosen: Tensor) -> Labelled:
        return Labelled(self.x[chosen], self.y[chosen])


Split = tuple[Labelled, Labelled]
"""(train, test)"""

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR_FILES = {
    "cifar10": ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
}


def mnist(root: Path) -> Split:
    """60,000 and 10,000 handwritten digits, (1, 28, 28) uint8."""
    places = [root / "MNIST" / "raw", root / "MNIST", root, root / "mnist"]
    contents = {
        name: gzip.decompress(_verified("mnist", name, places, wanted, MNIST_URL + name))
        for name, wanted in MNIST_FILES.items()
    }
    images, labels, test_images, test_labels = contents.values()
    return (
        Labelled(_idx(images).unsqueeze(1), _idx(labels).long()),
        Labelled(_idx(test_images).unsqueeze(1), _idx(test_labels).long()),
    )


def cifar(name: str, root: Path) -> Split:
    """50,000 and 10,000 pictures, (3, 32, 32) uint8; or for cifar10 the subset of a `cifar10*.npz`, where it is given
    instead of the official archive."""
    file, wanted = CIFAR_FILES[name]
    places = [root, root / name]
    subset = next((path for place in places for path in sorted(place.glob(f"{name}_*.npz"))), None)
    if subset is not None and not any((place / file).exists() for place in places):
        return read_subset(subset)
    path = _find(name, file, places, CIFAR_URL + file)
    _check_md5(path, _md5(path), wanted, CIFAR_URL + file)
    # cifar100 has two labels per picture, coarse and fine.
    label_bytes = 1 if name == "cifar10" else 2
    train, test = bytearray(), bytearray()
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.endswith(".bin"):
                content = archive.extractfile(member)
                assert content is not None
                (test if "test" in member.name else train).extend(content.read())
    return _pictures(bytes(train), label_bytes), _pictures(bytes(test), label_bytes)


def read_subset(path: Path) -> Split:
    """Pictures from an `.npz`."""
    with np.load(path, allow_pickle=False) as arrays:
        missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in arrays]
        if missing:
            raise InvalidData(f"{path} cannot be used: {', '.join(missing)} missing", hint=_SUBSET)
        parts = []
        for part in ("train", "test"):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if x.dtype != np.uint8 or x.shape[1:] != (3, 32, 32) or len(x) != len(y):
                found = f"x_{part} is {x.dtype} {list(x.shape)} for {counted(len(y), 'label')}"
                raise InvalidData(f"{path} cannot be used: {found}", hint=_SUBSET)
            parts.append(Labelled(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))))
    return parts[0], parts[1]


def digits() -> Split:
    """scikit-learn's own 1,797 handwritten digits, (1, 8, 8), 0 to 16 scaled to 0 to 255."""
    with imports_for("continual"):
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(np.rint(images * 255 / 16).astype(np.uint8), device="cpu").view(-1, 1, 8, 8)
    y = torch.tensor(labels, device="cpu")
    return Labelled(x[:1437], y[:1437]), Labelled(x[1437:], y[1437:])


def _find(dataset: str, name: str, places: list[Path], url: str) -> Path:
    for place in places:
        if (place / name).is_file():
            return place / name
    raise NotFound(
        f"{dataset} needs {name}, which is in none of {', '.join(map(str, places))}",
        hint=f"download {url} to {places[-1]}, or say with `--data-root` where it is",
    )


def _check_md5(path: Path, found: str, wanted: str, url: str) -> None:
    if found != wanted:
        raise InvalidData(
            f"{path} is not the official file: its md5 is {found}, not {wanted}", hint=f"download it again: {url}"
        )


def _verified(dataset: str, name: str, places: list[Path], wanted: str, url: str) -> bytes:
    path = _find(dataset, name, places, url)
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    _check_md5(path, found, wanted, url)
    return content


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _idx(content: bytes) -> Tensor:
    """The format of MNIST: two zero bytes, a type (8: uint8), the number of axes, their lengths, the data."""
    assert content[:3] == b"\0\0\x08"
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4).astype(int).tolist()
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())


def _pictures(content: bytes, label_bytes: int) -> Labelled:
    records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + IMAGE_BYTES)
    x = torch.from_numpy(records[:, label_bytes:].reshape(-1, 3, 32, 32).copy())
    return Labelled(x, torch.from_numpy(records[:, label_bytes - 1].astype(np.int64)))

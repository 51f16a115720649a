"""Streams, pictures, networks and numbers, each against something outside."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.errors import Conflict
from paceline.recipes.continual import backbones, files, incremental, matrix, pixels, streams
from paceline.recipes.continual.files import Labelled
from paceline.recipes.continual.methods.agem import turn
from paceline.recipes.continual.methods.gdumb import greedy_balanced
from paceline.recipes.continual.methods.lwf import distillation
from paceline.recipes.continual.plot import heat_map
from tests.recipes.continual.small import alone, train

MNIST = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[4] / "shared" / "data"))


def some(num: int = 40, classes: int = 5) -> Labelled:
    y = torch.arange(num) % classes
    return Labelled((torch.arange(num)[:, None, None, None] + torch.zeros(1, 4, 4)).to(torch.uint8), y)


def test_class_incremental_shares_classes_and_loses_nothing() -> None:
    data = some()
    parts = incremental.class_incremental((data, data), 3)
    assert [part.classes for part in parts] == [(0, 1), (2, 3), (4,)]
    found = [part.train() for part in parts]
    assert sum(len(each) for each in found) == len(data)
    for part, each in zip(parts, found, strict=True):
        assert set(each.y.tolist()) == set(part.classes)
        assert (each.x[:, 0, 0, 0] % 5 == each.y).all()
    given = incremental.class_incremental((data, data), 2, order=[4, 0, 3, 1, 2])
    assert [part.classes for part in given] == [(4, 0, 3), (1, 2)]
    with pytest.raises(Conflict, match="6 tasks cannot share 5 classes"):
        incremental.class_incremental((data, data), 6)


def test_any_labelled_data_set_will_do() -> None:
    pairs = [(np.full((1, 2, 2), number, np.uint8), number % 3) for number in range(9)]
    parts = incremental.class_incremental((pairs, pairs), 3)  # type: ignore[arg-type]
    assert [part.test().x[:, 0, 0, 0].tolist() for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_domains_are_views() -> None:
    data = some()
    parts = incremental.domain_incremental((data, data), [lambda x: x, lambda x: 255 - x])
    assert torch.equal(parts[1].train().x, 255 - data.x)
    assert torch.equal(parts[1].test().y, data.y)
    assert {part.classes for part in parts} == {(0, 1, 2, 3, 4)}


def test_views_of_pictures() -> None:
    x = torch.randint(0, 256, (7, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mixed = pixels.permute(x, 3)
    assert torch.equal(mixed.flatten(1).sort(1)[0], x.flatten(1).sort(1)[0])
    assert not torch.equal(mixed, x)
    assert torch.equal(pixels.permute(x, 3), mixed)
    assert torch.equal(pixels.rotate(x, 0), x)
    assert torch.equal(pixels.rotate(x, 90), x.rot90(1, (2, 3))) or torch.equal(
        pixels.rotate(x, 90), x.rot90(-1, (2, 3))
    )
    assert torch.equal(pixels.rotate(x, 180), x.flip(2, 3))


def test_crops_are_crops_and_flips_are_flips() -> None:
    x = torch.arange(1, 2 * 3 * 6 * 6 + 1).view(2, 3, 6, 6)
    torch.manual_seed(0)
    seen = set()
    for _ in range(60):
        padded = F.pad(x, (2,) * 4)
        for number, picture in enumerate(pixels.crop_and_flip(x, 2)):
            options = {
                (down, right, flipped): (crop.flip(2) if flipped else crop)
                for down in range(5)
                for right in range(5)
                for crop in [padded[number, :, down : down + 6, right : right + 6]]
                for flipped in (False, True)
            }
            found = [name for name, option in options.items() if torch.equal(option, picture)]
            assert len(found) == 1
            seen.update(found)
    assert len(seen) > 40


def test_scale_is_the_usual_one() -> None:
    x = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, deviation = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    wanted = (x.double() / 255 - torch.tensor(mean).double().view(1, 3, 1, 1)) / torch.tensor(deviation).double().view(
        1, 3, 1, 1
    )
    assert torch.allclose(pixels.scale(x, mean, deviation).double(), wanted, atol=1e-5)


def test_cifar_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    pictures = {
        name: random.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
        for name in ("data_batch_1", "data_batch_2", "test_batch")
    }
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, x in pictures.items():
            content = b"".join(bytes([number]) + picture.tobytes() for number, picture in enumerate(x))
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setitem(files.CIFAR_FILES, "cifar10", (path.name, files._md5(path)))
    train_part, test_part = files.cifar("cifar10", tmp_path)
    assert np.array_equal(train_part.x.numpy(), np.concatenate([pictures["data_batch_1"], pictures["data_batch_2"]]))
    assert np.array_equal(test_part.x.numpy(), pictures["test_batch"])
    assert train_part.y.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.skipif(not (MNIST / "mnist").exists(), reason="the official MNIST files are not here")
def test_real_mnist_is_read() -> None:
    train_part, test_part = files.mnist(MNIST)
    assert train_part.x.shape == (60000, 1, 28, 28)
    assert torch.bincount(test_part.y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_networks_have_their_published_sizes() -> None:
    def count(model: nn.Module) -> int:
        return sum(weight.numel() for weight in model.parameters())

    assert count(backbones.build("mlp", (1, 28, 28), 10)) == 784 * 100 + 100 + 100 * 100 + 100 + 1000 + 10
    assert count(backbones.build("resnet18", (3, 32, 32), 10)) == 11_173_962  # as given for CIFAR-10 everywhere
    small = backbones.ResNet18((3, 32, 32), 7, width=2)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert small.features(torch.zeros(2, 3, 32, 32)).shape == (2, 16)


def test_numbers_of_the_matrix_by_hand() -> None:
    known = np.array([[0.9, 0.1, np.nan], [0.7, 0.8, 0.2], [0.4, 0.85, 0.95]])
    assert matrix.average(known, 2) == pytest.approx((0.4 + 0.85 + 0.95) / 3)
    assert matrix.forgetting(known) == pytest.approx(((0.9 - 0.4) + (0.8 - 0.85)) / 2)
    assert matrix.backward_transfer(known) == pytest.approx(((0.4 - 0.9) + (0.85 - 0.8)) / 2)
    assert matrix.forward_transfer(known, np.array([0.5, 0.3, 0.3])) == pytest.approx(((0.1 - 0.3) + (0.2 - 0.3)) / 2)
    picture = heat_map(known, ["a", "b<", "c"], "x & y")
    assert picture.count("<rect") == 10
    assert "85.0" in picture
    assert "b&lt;" in picture


def test_turned_gradient_is_the_projection() -> None:
    step, stored = torch.tensor([1.0, -3.0]).double(), torch.tensor([0.0, 2.0]).double()
    assert turn(step, stored).tolist() == [1.0, 0.0]
    assert torch.equal(turn(-step, stored), -step)


def test_distillation_is_least_where_outputs_agree() -> None:
    before = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output = before.clone().requires_grad_()
    distillation(output, before, 2.0).backward()
    assert output.grad is not None
    assert output.grad.abs().max() < 1e-12
    soft = torch.softmax(before / 2, 1)
    entropy = -(soft * soft.log()).sum()
    assert float(distillation(before, before, 2.0)) == pytest.approx(float(entropy))


def test_greedy_balanced_keeps_equal_shares() -> None:
    labels = np.repeat([0, 1, 2], [300, 200, 100])
    kept = greedy_balanced(1, labels, 30)
    assert np.bincount(labels[kept]).tolist() == [10, 10, 10]
    assert len(set(kept.tolist())) == 30
    assert len(greedy_balanced(1, labels, 1000)) == 600


def test_scenario_task_trains_and_predicts_within_the_task() -> None:
    class_il, task_il = (
        train(alone(), {"method": "er", "scenario": scenario, "precision": None}) for scenario in ("class", "task")
    )
    assert class_il["losses"][0] == pytest.approx(np.log(10), rel=0.25)  # ten classes to choose from, or two
    assert task_il["losses"][0] == pytest.approx(np.log(2), rel=0.4)
    assert task_il["task_il"][-1][0] > task_il["class_il"][-1][0]


@pytest.mark.parametrize("name", ["seq-digits"])
def test_streams_say_who_belongs_together(name: str) -> None:
    stream = streams.build(name, Path(), num_tasks=None, scenario=None, permute_classes=True, seed=4)
    assert stream.num_classes == 10
    assert stream.together.sum().item() == 20
    assert stream.seen.sum(1).tolist() == [2, 4, 6, 8, 10]
    again = streams.build(name, Path(), num_tasks=None, scenario=None, permute_classes=True, seed=4)
    assert [part.classes for part in again.experiences] == [part.classes for part in stream.experiences]
    assert [part.classes for part in stream.experiences] != [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]

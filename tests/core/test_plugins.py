"""Plugins are found without an import, clashes and broken ones are named with their packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline import PacelineError, TrainConfig
from paceline.cli.main import main
from paceline.core import plugins
from paceline.core.plugins import Plugin, PluginFails, PluginsClash
from paceline.observe import loggers
from paceline.optim import build, schedule
from paceline.world.discover.environment import discover


def install(site: Path, package: str, version: str, entries: str, **modules: str) -> None:
    """Write what an installer leaves of a package."""
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv(plugins.SWITCH, raising=False)
    plugins._scan.cache_clear()
    return folder


def test_names_are_listed_without_an_import(site: Path) -> None:
    install(site, "Paceline_Tiger", "2.1", "[paceline.optimizers]\ntiger = never_there:Tiger\n")
    plugins._scan.cache_clear()
    assert plugins.names("optimizers") == ["tiger"]
    assert plugins.find("optimizers", "tiger") == Plugin(
        "optimizers", "tiger", "paceline-tiger", "2.1", "never_there:Tiger"
    )
    assert TrainConfig(epochs=1, optimizer="tiger").optimizer == "tiger"
    assert "never_there" not in sys.modules


def test_only_what_is_used_is_imported(site: Path) -> None:
    install(
        site,
        "two",
        "1",
        "[paceline.loggers]\nfirst_one = plugin_first:make\nother_one = plugin_other:make\n",
        plugin_first="from paceline import Callback as make",
        plugin_other="raise SystemExit('imported')",
    )
    plugins._scan.cache_clear()
    built, missing = loggers.build(["first_one"], is_asked=True)
    assert len(built) == 1
    assert not missing
    assert "plugin_first" in sys.modules
    assert "plugin_other" not in sys.modules
    del sys.modules["plugin_first"]
    with pytest.raises(PluginFails, match=r"the logger 'other_one' of two 1 cannot be loaded: SystemExit: imported \("):
        loggers.build(["other_one"], is_asked=True)


def test_two_packages_with_one_name_are_both_named(site: Path) -> None:
    install(site, "one", "1.0", "[paceline.schedules]\nwave = a:b\n")
    install(site, "two", "2.0", "[paceline.schedules]\nwave = c:d\n")
    plugins._scan.cache_clear()
    with pytest.raises(PluginsClash) as refused:
        plugins.find("schedules", "wave")
    assert {"one 1.0", "two 2.0"} == set(refused.value.packages)
    assert "`--no-plugins`" in refused.value.hint


def test_a_plugin_cannot_take_a_name_of_ours(site: Path) -> None:
    install(site, "thief", "1.0", "[paceline.optimizers]\nadamw = a:b\n")
    plugins._scan.cache_clear()
    with pytest.raises(PluginsClash, match="the optimizer 'adamw' is offered by paceline itself and thief 1.0"):
        plugins.find("optimizers", "adamw", ["sgd", "adamw"])
    assert [clash.name for clash in plugins.clashes({"optimizers": ["adamw"]})] == ["adamw"]


def test_the_same_package_twice_on_the_path_is_one(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "one", "1.0", "[paceline.schedules]\nwave = a:b\n")
    install(tmp_path / "older", "one", "0.9", "[paceline.schedules]\nwave = a:b\n")
    monkeypatch.syspath_prepend(tmp_path / "older")
    monkeypatch.syspath_prepend(site)
    plugins._scan.cache_clear()
    found = plugins.find("schedules", "wave")
    assert found is not None
    assert found.version == "1.0"


def test_switched_off(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "one", "1.0", "[paceline.optimizers]\nwave = a:b\n")
    plugins._scan.cache_clear()
    assert plugins.names("optimizers") == ["wave"]
    monkeypatch.setenv(plugins.SWITCH, "1")
    assert plugins.names("optimizers") == []
    monkeypatch.setenv(plugins.SWITCH, "0")
    assert plugins.names("optimizers") == ["wave"]


def test_what_cannot_be_read_stops_nobody_and_is_known(site: Path) -> None:
    install(site, "wrong-group", "1.0", "[paceline.optimisers]\nwave = a:b\n")
    install(site, "nameless", "1.0", "[paceline.loggers]\nwave = a:b\n")
    (site / "nameless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    install(site, "bytes", "1.0", "[paceline.loggers]\n")
    (site / "bytes-1.0.dist-info" / "entry_points.txt").write_bytes(b"[paceline.loggers]\n\xff = a:b")
    install(site, "good", "1.0", "[paceline.loggers]\ngood = a:b\n")
    plugins._scan.cache_clear()
    assert plugins.names("loggers") == ["good"]
    reasons = dict(plugins.installed().unreadable)
    assert "there is no group paceline.optimisers" in reasons["wrong-group"]
    assert {"nameless-1.0.dist-info", "bytes-1.0.dist-info"} <= set(reasons)


@pytest.mark.parametrize(
    ("value", "text", "match"),
    [
        ("broken_a:make", "import no_such_module_here", "ModuleNotFoundError.*broken_a.py, line 1"),
        ("broken_a:make", "def make(:", "SyntaxError"),
        ("broken_a:make", "other = 1", "AttributeError.*'make'"),
        ("broken_a", "", "is not of the form module:name"),
        ("broken_a:make", "make = 3", "is a int, not a torch.optim.Optimizer class"),
        ("broken_a:make", "def make(groups, settings, device): return 1", "is a int, not a torch.optim.Optimizer"),
        ("broken_a:make", "def make(groups, settings, device): return 1 / 0", "ZeroDivisionError.*line 1"),
        ("broken_a:make", "class make:\n    def __init__(self, groups): pass", "unexpected keyword argument 'lr'"),
    ],
)
def test_a_broken_optimizer_is_a_message(site: Path, value: str, text: str, match: str) -> None:
    import torch

    install(site, "bad", "0.3", f"[paceline.optimizers]\nbad = {value}\n", broken_a=text)
    plugins._scan.cache_clear()
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))]}]
    try:
        with pytest.raises(PluginFails, match=rf"(?s)the optimizer 'bad' of bad 0.3 .*{match}"):
            build.optimizer(TrainConfig(epochs=1, optimizer="bad"), groups, torch.device("cpu"))
    finally:
        sys.modules.pop("broken_a", None)


def test_options_that_a_class_takes(site: Path) -> None:
    import torch

    install(site, "good", "1", "[paceline.optimizers]\nmine = torch.optim:RMSprop\n")
    plugins._scan.cache_clear()
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))]}]
    settings = TrainConfig(epochs=1, optimizer="mine", momentum=0.5, betas=(0.1, 0.2), lr=0.25)
    made = build.optimizer(settings, groups, torch.device("cpu"))
    assert isinstance(made, torch.optim.RMSprop)
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.25, 0.5)
    assert build.unused(settings) == ["betas"]


def test_a_schedule_as_a_formula(site: Path) -> None:
    install(
        site,
        "good",
        "1",
        "[paceline.schedules]\nhalves = plugin_halves:rate\nbad = plugin_halves:bad\n",
        plugin_halves="def rate(span, step): return span.settings.lr / (step + 1)\ndef bad(span, step): return -1",
    )
    plugins._scan.cache_clear()
    settings = TrainConfig(epochs=1, schedule="halves", lr=1.0, warmup_steps=1, min_lr=0.1)
    rate = schedule.build(settings, None)
    assert [rate(0), rate(1), rate(3)] == [0.5, 0.5, 0.25]
    assert schedule.unused(settings) == []
    wrong = schedule.build(TrainConfig(epochs=1, schedule="bad"), None)
    with pytest.raises(PluginFails, match="the schedule 'bad' of good 1 fails at step 7: its learning rate is -1"):
        wrong(7)


def test_a_launcher_is_asked_where_its_variable_is_set(site: Path) -> None:
    text = """
from paceline import World
def discover(env):
    size = int(env["MY_SIZE"])
    if size == 0: return None
    return World(int(env["MY_RANK"]), 0, size, 1, 0, size, "other", "h:1" if size != 3 else None)
"""
    install(site, "mine", "1", "[paceline.launchers]\nmine.MY_RANK = plugin_mine:discover\n", plugin_mine=text)
    plugins._scan.cache_clear()
    assert discover({}).launcher == "plain"
    assert "plugin_mine" not in sys.modules
    world = discover({"MY_RANK": "1", "MY_SIZE": "2"})
    assert (world.rank, world.size, world.launcher) == (1, 2, "mine")
    assert "asked the launcher 'mine.MY_RANK' of mine 1" in world.why[0]
    assert discover({"MY_RANK": "1", "MY_SIZE": "0"}).launcher == "plain"
    with pytest.raises(PluginFails, match="3 ranks, and no `meeting`"):
        discover({"MY_RANK": "1", "MY_SIZE": "3"})
    with pytest.raises(PluginFails, match="KeyError"):
        discover({"MY_RANK": "1"})
    with pytest.raises(PacelineError, match="rank 5 of 2"):
        discover({"MY_RANK": "5", "MY_SIZE": "2"})


def test_a_launcher_without_a_variable_is_passed_over(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, no command ran any more, not even the doctor that was to name it."""
    install(site, "mine", "1", "[paceline.launchers]\nmine = a:b\n")
    plugins._scan.cache_clear()
    assert discover({}).launcher == "plain"
    main(["doctor", "--json"])
    assert "must be named NAME.VARIABLE" in capsys.readouterr().out


def test_a_misspelt_name_is_answered_with_the_plugins(site: Path) -> None:
    from paceline.config.python_call import settings_of_call

    install(site, "good", "1", "[paceline.optimizers]\nsophia = a:b\n")
    plugins._scan.cache_clear()
    with pytest.raises(PacelineError, match="or a plugin's: sophia") as wrong:
        settings_of_call(TrainConfig, {"epochs": 1, "optimizer": "sofia"}, "fit")
    assert wrong.value.hint == "did you mean sophia?"


def test_versions_that_changed() -> None:
    now = Plugin("optimizers", "lion", "paceline-lion", "1.1", "a:b")
    assert plugins.changes([now.record()], [now]) == []
    assert plugins.changes([], [now]) == []
    before = Plugin("optimizers", "lion", "paceline-lion", "1.0", "a:b").record()
    assert plugins.changes([before], [now]) == [
        "the optimizer 'lion' is now of paceline-lion 1.1; the run was last started with paceline-lion 1.0"
    ]

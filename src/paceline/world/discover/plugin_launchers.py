"""Launchers that plugins know: where a variable is set that an entry point names, its function is asked.

The name of an entry point of `paceline.launchers` is `NAME.VARIABLE`, as in `flux.FLUX_TASK_RANK = "pkg:discover"`.
The package is imported only where that variable is set, so a run under another launcher never imports it. An entry
point of another form can be asked by no run: it is passed over, and `paceline doctor` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core import plugins

if TYPE_CHECKING:
    from paceline.world.discover.environment import World

BUILT_IN = (
    *("plain", "procs", "torchrun", "environment", "openmpi", "mpich", "slurm", "ray", "jsm", "pals", "group"),
    *("azureml", "vertex", "sagemaker", "kubeflow"),
)
"""Names that a plugin's launcher may not have."""


def from_plugins(env: Mapping[str, str]) -> World | None:
    """Return the world as a plugin's launcher describes it; None where none has anything to say."""
    for plugin in plugins.installed().of("launchers"):
        name, variable = split(plugin)
        if not name or not variable or variable not in env:
            continue
        plugins.find("launchers", plugin.name)
        if name in BUILT_IN:
            raise plugins.PluginsClash("launcher", name, [plugins.OURS, plugin.origin])
        world = _asked(plugin, env)
        if world is not None:
            why = f"{variable} is set: asked {plugin.title}"
            return replace(world, launcher=name, why=(why, *world.why))
    return None


def split(plugin: plugins.Plugin) -> tuple[str, str]:
    """Return the name of a launcher, and the variable by which it is recognised; empty where it has none."""
    name, _, variable = plugin.name.partition(".")
    return name, variable


def plugin_of(launcher: str) -> plugins.Plugin | None:
    """Return the plugin that a launcher's name stands for."""
    return next((each for each in plugins.installed().of("launchers") if split(each)[0] == launcher), None)


def _asked(plugin: plugins.Plugin, env: Mapping[str, str]) -> World | None:
    from paceline.world.discover.environment import World

    discover = plugins.load(plugin)
    if not callable(discover):
        raise plugins.unfit(plugin, discover, "a function that takes the environment")
    world = plugins.guarded(plugin, "fails", lambda: discover(dict(env)))
    if world is not None and not isinstance(world, World):
        raise plugins.unfit(plugin, world, "a paceline.World, or None")
    if world is not None and world.size > 1 and world.meeting is None:
        raise plugins.PluginFails(plugin.title, "fails", f"{world.size} ranks, and no `meeting` (host:port) for them")
    return world

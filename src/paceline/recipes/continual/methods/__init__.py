"""The methods by name, as data; one small file each."""

from __future__ import annotations

METHODS = {
    "finetune": "finetune:Finetune",
    "joint": "joint:Joint",
    "er": "er:ER",
    "er_ace": "er_ace:ErAce",
    "der": "der:Der",
    "derpp": "derpp:DerPlusPlus",
    "agem": "agem:AGem",
    "lwf": "lwf:LwF",
    "ewc_on": "ewc_on:OnlineEwc",
    "gdumb": "gdumb:GDumb",
}
OTHER_NAMES = {"sgd": "finetune", "der++": "derpp", "er-ace": "er_ace", "a-gem": "agem", "ewc-on": "ewc_on"}
"""Accepted too."""

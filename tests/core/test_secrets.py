"""Secrets are recognized by name or form, and nothing else is changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.provenance import command_line
from paceline.core.secrets import MASK, masked, masked_command, masked_values, masked_words

KEY = "hf_abcdefghijklmnopqrstuvwxyz012345"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (KEY, MASK),
        (f"use {KEY}, please", f"use {MASK}, please"),
        ("ghp_" + "a1B2" * 9, MASK),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("sk-proj-abcdefghij0123456789", MASK),
        ("s3://me:pass@host/bucket", f"s3://me:{MASK}@host/bucket"),
        ("s3://me:pa/ss@host/bucket", f"s3://me:{MASK}@host/bucket"),
        ("ssh://host:22/a@b", "ssh://host:22/a@b"),
        ("WANDB_API_KEY=abc train", f"WANDB_API_KEY={MASK} train"),
        ("https://x/y?X-Amz-Signature=0123456789abcdef01&a=1", f"https://x/y?X-Amz-Signature={MASK}&a=1"),
        ("Authorization: Bearer abcdefgh12345678", f"Authorization: Bearer {MASK}"),
        ("password=x", f"password={MASK}"),
        *((text, text) for text in ("eos_token=</s>", "token", "tokens=4000", "runs/a-token", "key=a", "--lr 0.1")),
        *((text, text) for text in ("monkey=abc", "c95dc08e1a2b3c4d5e6f", "s3://bucket/a:b@c", "data/train.json")),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_settings_at_any_depth() -> None:
    values = {
        "api_key": "abc",
        "hf_token": "a1b2c3d4e5f6a7b8",
        "eos_token": "<end-of-sentence>",
        "pad_token": "<pad>",
        "max_tokens": 4000,
        "lr": 0.1,
        "data": {"password": "x", "urls": [f"https://u:{KEY}@h", 3, None]},
        "secret": None,
    }
    assert masked_values(values) == {
        **values,
        "api_key": MASK,
        "hf_token": MASK,
        "data": {"password": MASK, "urls": [f"https://u:{MASK}@h", 3, None]},
    }


def test_commands() -> None:
    typed = ["train", "x", "--api-key", "abc", "--password=x", "--lr", "0.1", "--db-password", "two words", KEY]
    shown = ["train", "x", "--api-key", MASK, f"--password={MASK}", "--lr", "0.1", "--db-password", MASK, MASK]
    assert masked_words(typed) == shown
    assert "abc" not in command_line(["/x/paceline/__main__.py", *typed])
    assert masked_command("paceline train --api-key 'a b'") == f"paceline train --api-key '{MASK}'"
    assert masked_command("it's") == "it's"
    assert masked_command(None) is None


@given(st.text())
def test_masking_twice_is_masking_once(text: str) -> None:
    once = masked(text)
    assert masked(once) == once


@pytest.mark.parametrize("part", ["x", "x-", "eyJ-", "eyJhbGciOi.", ":/", "://a:", "key", "token_", "bearer ", "a@"])
def test_words_of_any_length(part: str) -> None:
    """In a time that grows with the length: by its square, one of these would take hours."""
    word = part * (400_000 // len(part))
    assert masked(word) == word

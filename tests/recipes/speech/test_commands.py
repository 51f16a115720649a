"""Speech recognition as it is typed: `paceline train asr`, `eval`, `infer`; help, files of settings, mistakes."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline.asr
from paceline.cli.main import main
from paceline.core.extras import PackagesMissing
from paceline.observe.journal import read
from paceline.observe.sample_scores import read_scores
from paceline.recipes.speech.settings import AsrSettings
from paceline.train.checkpoint import reader as restore
from paceline.train.find_task import find_task
from tests.commands import run_command
from tests.forked import Forked
from tests.recipes.speech import tiny

Type = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a run that has learned to write something."""
    made = tmp_path_factory.mktemp("speech")
    tiny.speech(made, "train", 48, seed=1)
    tiny.speech(made, "dev", 9, seed=2)
    tiny.speech(made, "other", 5, seed=3)
    (made / "network.yaml").write_text(yaml.safe_dump(tiny.PLAIN))
    learn = ("--epochs", 25, "--optimizer", "adamw", "--lr", 0.03, "--val-every-epochs", 5)
    words = typed(made, *learn, "--grains", 1, "--progress", "none", "--out", made / "run")
    assert main([str(word) for word in words]) == 0
    return made


def typed(folder: Path, *words: object) -> list[object]:
    fixed = ["train", "asr", "--device", "cpu", "--threads", 1, "--workers", 0, "--loggers", "none"]
    data = ["--network", folder / "network.yaml", "--train-manifest", folder / "train.json"]
    sets = f"{folder / 'dev.json'},{folder / 'other.json'}"
    return [*fixed, *data, "--val-manifest", sets, "--global-batch", 8, *words]


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Type:
    """Type a command that is right; what it prints."""

    def type_right(*words: object) -> str:
        capfd.readouterr()
        code = main([str(word) for word in words])
        printed = capfd.readouterr()
        assert code == 0, printed.err
        return printed.out

    return type_right


@pytest.fixture
def mistake(capfd: pytest.CaptureFixture[str]) -> Type:
    """Type a command that is wrong; its message."""

    def type_wrong(*words: object) -> str:
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        printed = capfd.readouterr().err
        assert "Traceback" not in printed
        return printed[printed.index("error: ") :]

    return type_wrong


# -- labels ------------------------------------------------------------------------------------------------------------


def respelled(folder: Path, name: str, changes: dict[str, str]) -> Path:
    """The manifest with other letters, as of another language."""
    table = str.maketrans(changes)
    lines = [json.loads(line) for line in (folder / f"{name}.json").read_text().splitlines()]
    named = [{**line, "text": line["text"].translate(table)} for line in lines]
    return tiny.manifest(folder / f"{name}-{'-'.join(changes.values())}.json", named)


def test_labels_that_lack_letters_are_refused_with_those_to_set(folder: Path, shown: Type, mistake: Type) -> None:
    german, sets = respelled(folder, "train", {"b": "ß", "c": "ä"}), respelled(folder, "dev", {"b": "ß"})
    words = [*typed(folder, "--epochs", 1), "--train-manifest", german, "--val-manifest", sets]
    message = mistake(*words)
    assert "train, dev-ß: " in message
    assert "of the words lose letters that are not among the labels: ß" in message
    assert "becomes" in message
    assert '`--labels " abcßä"`' in message

    run = folder / "german"
    printed = shown(*words, "--out", run, "--labels", " abcßä")
    assert "lost letters" not in printed
    assert paceline.asr.load(run).labels.symbols == tuple(" abcßä")
    printed = shown(*words, "--out", folder / "mutilated", "--max-lost-words", 1)
    assert "of the words lost letters" in printed

    assert "the model cannot write them" in mistake("eval", folder / "run", "--manifest", sets, "--device", "cpu")
    assert shown("eval", folder / "run", "--manifest", sets, "--device", "cpu", "--max-lost-words", 1)
    assert "'a' stands there more than once" in mistake(*words, "--labels", " aab")


# -- eval --------------------------------------------------------------------------------------------------------------


def logged(run: Path) -> dict[str, float]:
    """What training found of the checkpoint that is the best."""
    best = restore.best(run / "checkpoints").checkpoint
    assert best is not None
    (record,) = [each for each in read(run / "metrics.jsonl", "validation") if each["step"] + 1 == best.step]
    return {name: value for name, value in record.items() if "/" in name}


def test_errors_of_utterances_are_kept_for_comparisons(folder: Path) -> None:
    """Of the last validation, in the order of the manifest: they give the rate in the journal."""
    scores = read_scores(folder / "run")
    last = read(folder / "run" / "metrics.jsonl", "validation")[-1]
    assert len(scores["dev/wer"].rows) == len(tiny.lines_of(folder / "dev.json"))
    assert {name: scores[name].value() for name in scores} == pytest.approx(
        {name: last[name] for name in ("dev/wer", "other/wer")}
    )


def test_eval_gives_what_training_wrote_down(folder: Path, shown: Type) -> None:
    run, manifests = folder / "run", f"{folder / 'dev.json'},{folder / 'other.json'}"
    expected = logged(run)
    assert expected["dev/cer"] < 0.5
    for words in ((), ("--manifest", manifests)):
        found = json.loads(shown("eval", run, "--device", "cpu", "--json", *words))
        assert found["metrics"] == expected
    one = json.loads(shown("eval", run, "--device", "cpu", "--json", "--manifest", f"new={folder / 'other.json'}"))
    assert one["metrics"] == {
        name.replace("other/", "new/"): value for name, value in expected.items() if name.startswith("other/")
    }


def test_a_beam_with_a_language_model(folder: Path, shown: Type, mistake: Type, tmp_path: Path) -> None:
    """In eval and infer, in batches of any size, from the command line and from Python: the same words."""
    run, lm, one = folder / "run", tmp_path / "lm.arpa", folder / "dev" / "0.flac"
    assert "3-grams" in shown("lm", folder / "train.json", lm, "--run", run)
    beam = ("--device", "cpu", "--decoder", "beam", "--beam", 4, "--lm", lm, "--lm-weight", 0.4, "--word-bonus", 1)
    metrics = json.loads(shown("eval", run, *beam, "--json"))["metrics"]
    assert metrics != logged(run)
    assert (
        json.loads(shown("eval", run, *beam, "--json", "--eval-batch", 3))["metrics"]["dev/wer"] == metrics["dev/wer"]
    )
    records = [json.loads(line) for line in shown("infer", run, *beam, "--json", folder / "dev").splitlines()]
    two = run_command([*map(str, ("infer", run, *beam, "--json", folder / "dev", "--procs", 2))])
    assert two.code == 0, two.err
    assert [json.loads(line) for line in two.out.splitlines()] == records
    names = [record["name"] for record in records]
    recognizer = paceline.asr.load(
        run, device="cpu", decoder="beam", beam_width=4, lm=lm, lm_weight=0.4, word_bonus=1.0
    )
    assert recognizer.transcribe(names) == [record["prediction"] for record in records]
    for record, (best, *_) in zip(records, recognizer.hypotheses(names, 3), strict=True):
        assert record["score"] == pytest.approx(best.score, abs=1e-3)
        assert " ".join(word["word"] for word in record["words"]) == record["prediction"]
        assert all(0 <= word["start"] < word["end"] and word["score"] <= 0 for word in record["words"])
        assert record["score"] == pytest.approx(record["acoustic_score"] + record["lm_score"], abs=1e-6)
    plain = shown("infer", run, "--device", "cpu", "--decoder", "beam", one)
    heard = shown("infer", run, one, "--device", "cpu", "--decoder", "beam", "--hotwords", "c,ab c")
    assert plain.startswith(f"{one}\t")
    assert heard.count("c") >= plain.count("c")
    assert "add `--decoder beam`; for greedy: `--lm none`" in mistake("eval", run, "--device", "cpu", "--lm", lm)
    assert "for greedy: `--hotwords none`" in mistake("eval", run, "--device", "cpu", "--hotwords", "c")
    assert "no label writes: z w ö l f" in mistake("infer", run, one, *beam, "--hotwords", "zwölf")
    lm.write_text(lm.read_text().upper().replace("<S>", "<s>").replace("</S>", "</s>").replace("<UNK>", "<unk>"))
    lm.write_text(lm.read_text().replace("DATA", "data").replace("NGRAM", "ngram").replace("-GRAMS", "-grams"))
    lm.write_text(lm.read_text().replace("END", "end"))
    assert "none of the words" in mistake("eval", run, *beam)
    lm.write_text("once upon a time")
    assert "is no language model" in mistake("eval", run, *beam)


def test_greedy_leaves_out_the_language_model_of_the_run(folder: Path, shown: Type, mistake: Type) -> None:
    """Its file may be gone; a model that is typed beside it is a contradiction."""
    run, lm = folder / "validated-with-lm", folder / "gone.arpa"
    shown("lm", folder / "train.json", lm, "--order", 2, "--labels", " abc")
    beam = ("--decoder", "beam", "--lm", lm, "--hotwords", "ab")
    shown(*typed(folder, "--steps", 1, *beam, "--progress", "none", "--out", run))
    long = ("infer", run, min((folder / "dev").iterdir()), "--device", "cpu", "--long-s", 0.01)
    assert "set `--decoder greedy`" in mistake(*long)
    assert shown(*long, "--decoder", "greedy")
    lm.unlink()
    assert shown("eval", run, "--device", "cpu", "--decoder", "greedy")
    assert "`--lm none`" in mistake("eval", run, "--device", "cpu", "--decoder", "greedy", "--lm", lm)
    assert "is no language model" in mistake("eval", run, "--device", "cpu")


def test_words_have_times_with_every_decoder_and_length(folder: Path, shown: Type) -> None:
    run, one = folder / "run", min((folder / "dev").iterdir())
    (line,) = shown("infer", run, one, "--device", "cpu", "--json").splitlines()
    short = json.loads(line)
    (best,) = paceline.asr.load(run, device="cpu").hypotheses([one])[0]
    assert short["prediction"] == best.text
    assert [(word["word"], word["start"], word["end"]) for word in short["words"]] == [
        (word.text, word.start, word.end) for word in best.words
    ]
    assert short["words"]
    long = json.loads(shown("infer", run, one, "--device", "cpu", "--json", "--long-s", 0.01))
    assert long["index"] == short["index"] == 0
    assert [set(word) for word in long["words"]] == [{"word", "start", "end"}] * len(long["prediction"].split())


def test_archives_and_exports_are_used_as_their_run(folder: Path, shown: Type, mistake: Type, tmp_path: Path) -> None:
    run, sets = folder / "run", f"{folder / 'dev.json'},{folder / 'other.json'}"
    used = ("--device", "cpu", "--json")
    metrics = json.loads(shown("eval", run, *used, "--manifest", sets))["metrics"]
    heard = shown("infer", run, folder / "dev", *used)
    one = min((folder / "dev").iterdir())
    long = shown("infer", run, one, *used, "--long-s", 0.01)
    for model in (tmp_path / "model.nemo", tmp_path / "exported"):
        shown("export", run, model)
        results = json.loads(shown("eval", model, *used, "--manifest", sets))
        assert results["metrics"] == pytest.approx(metrics)
        assert (results["run"], results["step"]) == (str(model), None)
        records = [json.loads(line) for line in shown("infer", model, folder / "dev", *used).splitlines()]
        assert [record["prediction"] for record in records] == [
            json.loads(line)["prediction"] for line in heard.splitlines()
        ]
        assert shown("infer", model, one, *used, "--long-s", 0.01) == long
        assert shown("infer", "--decoder", "beam", model, one, *used)
        two = run_command([*map(str, ("eval", model, *used, "--manifest", sets, "--procs", 2))])
        assert two.code == 0, two.err
        assert json.loads(two.out)["metrics"] == pytest.approx(results["metrics"])
        assert "name some: `paceline eval RUN --manifest" in mistake("eval", model)
        assert "`--checkpoint` has nothing to choose from" in mistake("eval", model, "--checkpoint", "last")
        assert "`--average` has nothing to choose from" in mistake("infer", model, one, "--average", 2)
    assert "gone.nemo: there is no such file" in mistake("eval", tmp_path / "gone.nemo", "--manifest", sets)
    (tmp_path / "bad.nemo").write_bytes(b"no archive")
    assert "it is no tar file, or a damaged one" in mistake("eval", tmp_path / "bad.nemo", "--manifest", sets)


def test_eval_skips_bad_data_only_when_told(folder: Path, shown: Type, mistake: Type, tmp_path: Path) -> None:
    lines = tiny.lines_of(folder / "dev.json")
    for line in lines:
        line["audio_filepath"] = str(folder / line["audio_filepath"])
    bad = tiny.manifest(tmp_path / "dev.json", [*lines, "{", {**lines[0], "audio_filepath": "gone.flac"}])
    words = ("eval", folder / "run", "--device", "cpu", "--json", "--manifest", bad)
    said = mistake(*words)
    assert f"{bad}:10: is not JSON" in said
    assert f"{bad}:11: " in said
    found = json.loads(shown(*words, "--bad-data", "skip"))["metrics"]
    assert found == {name: value for name, value in logged(folder / "run").items() if name.startswith("dev/")}


def test_a_run_is_used_and_goes_on_from_another_folder(
    folder: Path, shown: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = typed(Path(), "--out", tmp_path / "run", "--progress", "none")
    shown(*words, "--epochs", 1)
    monkeypatch.chdir(tmp_path)
    assert set(json.loads(shown("eval", "run", "--device", "cpu", "--json"))["metrics"]) > {"dev/wer", "other/wer"}
    monkeypatch.chdir(folder.parent)
    again = typed(Path(folder.name), "--out", tmp_path / "run", "--resume", "auto")
    assert "this run is finished" in shown(*again, "--epochs", 1)  # its settings are not other ones


# -- infer -------------------------------------------------------------------------------------------------------------


def test_infer_prints_a_line_per_recording_in_order(folder: Path, shown: Type) -> None:
    run, dev = folder / "run", folder / "dev"
    names = [dev / "3.flac", *(dev / f"{row}.flac" for row in range(9))]
    words = ("infer", run, dev / "3.flac", dev, folder / "other.json", "--device", "cpu")
    names += [folder / "other" / f"{row}.flac" for row in range(5)]
    texts = paceline.asr.load(run, device="cpu").transcribe(names)
    assert shown(*words).splitlines() == [f"{name}\t{text}" for name, text in zip(names, texts, strict=True)]
    assert len(set(texts)) > 2
    records = [json.loads(line) for line in shown(*words, "--json").splitlines()]
    assert [(record["index"], record["name"], record["prediction"]) for record in records] == [
        (index, str(name), text) for index, (name, text) in enumerate(zip(names, texts, strict=True))
    ]


def test_infer_with_manifests_and_with_nothing_named(folder: Path, shown: Type) -> None:
    run = folder / "run"
    named = shown("infer", run, "--manifest", folder / "dev.json", "--device", "cpu").splitlines()
    validation = shown("infer", run, "--device", "cpu").splitlines()
    assert named == validation
    assert named[2].split("\t")[0] == str(folder / "dev" / "2.flac")
    one = ("--device", "cpu", folder / "dev" / "0.flac")
    assert shown("infer", run, *one) == named[0] + "\n"
    beam = shown("infer", "--beam-width", 4, "--decoder", "beam", run, *one)
    assert beam.startswith(f"{folder / 'dev' / '0.flac'}\t")


def test_names_that_are_no_utf8_and_names_that_are_too_long(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.flac"
    shutil.copy(folder / "dev" / "0.flac", os.fsdecode(name))
    words = ["infer", str(folder / "run"), "--device", "cpu"]
    assert main([*words, os.fsdecode(name)]) == 0
    printed = capfdbinary.readouterr().out
    assert printed.startswith(name + b"\t")
    assert main([*words, os.fsdecode(name), "--out", str(tmp_path / "out.txt")]) == 0
    assert (tmp_path / "out.txt").read_bytes() == printed
    capfdbinary.readouterr()
    assert main([*words, os.fsdecode(name), "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["name"] == os.fsdecode(name)
    for words in (["infer", str(folder / "run")], ["eval", str(folder / "run"), "--manifest"]):
        assert main([*words, "a" * 300 + ".json", "--device", "cpu"]) == 2
        assert b"cannot be read: File name too long" in capfdbinary.readouterr().err
    assert main(["infer", str(folder / "run"), "a" * 300 + ".wav", "--device", "cpu"]) == 2
    assert b"cannot be opened: File name too long" in capfdbinary.readouterr().err
    assert main(["export", str(folder / "run"), "/proc/none/model"]) == 2
    assert b"cannot export to /proc/none/model: " in capfdbinary.readouterr().err
    assert main(["export", str(folder / "run"), "a" * 300]) == 2
    assert b"is too long: a name has at most 255 bytes" in capfdbinary.readouterr().err


def test_infer_says_all_that_it_cannot_read(folder: Path, mistake: Type, shown: Type, tmp_path: Path) -> None:
    (tmp_path / "empty.wav").touch()
    words = ("infer", folder / "run", tmp_path / "gone.flac", folder / "dev" / "0.flac", tmp_path / "empty.wav")
    said = mistake(*words, "--device", "cpu")
    assert "2 recordings cannot be used" in said
    assert "gone.flac: there is no such file" in said
    assert "empty.wav: is empty" in said
    assert shown(*words, "--device", "cpu", "--bad-data", "skip").startswith(str(folder / "dev" / "0.flac"))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_help_is_for_people(shown: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = shown("train", "asr", "--help")
    assert "(default: quartznet15x5)" in text
    assert "Manifests to train on" in text
    assert "--bad-data {stop,skip}" in text
    assert "filters=" not in text
    assert len(text.splitlines()) < 500


def test_printed_settings_load_as_they_are(folder: Path, shown: Type, tmp_path: Path) -> None:
    perturb = ("--speed-range", 0.9, 1.1, "--text-rules", "basic", "--bad-data", "skip", "--warmup-steps", 3)
    words = typed(folder, "--epochs", 3, "--precision", "fp64", *perturb)
    printed = shown(*words, "--print-config")
    (tmp_path / "printed.yaml").write_text(printed)
    again = shown("train", "asr", "--config", tmp_path / "printed.yaml", "--print-config")
    assert again == printed
    values = yaml.safe_load(printed)
    assert AsrSettings(**values).network.labels == tiny.LABELS
    assert values["network"]["blocks"][1]["repeat"] == 2
    assert (values["warmup_steps"], values["warmup_ratio"], values["lr"]) == (3, None, 0.01)


def test_the_recipes_warmup_gives_way_to_any_other(folder: Path) -> None:
    plain = {"train_manifest": [folder / "train.json"], "epochs": 1, "network": tiny.NETWORK}
    assert AsrSettings(**plain).warmup_ratio == 0.05
    assert AsrSettings(**plain, warmup_steps=10).warmup_ratio is None
    assert AsrSettings(**plain, warmup_steps=0).warmup_ratio is None


def test_the_recipes_betas_are_those_of_its_optimizer_alone(folder: Path, shown: Type) -> None:
    plain = {"train_manifest": [folder / "train.json"], "epochs": 1, "network": tiny.NETWORK}
    assert AsrSettings(**plain).betas == AsrSettings(**plain, optimizer="novograd").betas == (0.95, 0.5)
    for optimizer in ("sgd", "adam", "adamw", "lamb"):
        assert AsrSettings(**plain, optimizer=optimizer).betas is None
        assert AsrSettings(**plain, optimizer=optimizer, betas=(0.8, 0.9)).betas == (0.8, 0.9)
    assert AsrSettings(**plain, betas=None).betas is None
    for words, betas in (((), [0.95, 0.5]), (("--optimizer", "adamw"), None)):
        assert yaml.safe_load(shown(*typed(folder, "--epochs", 1, *words, "--print-config")))["betas"] == betas


def test_mistakes_of_settings_are_explained(folder: Path, mistake: Type) -> None:
    said = mistake("train", "asr", "--network", "quarznet15x5", "--train-manifest", "a.json", "--epochs", 1)
    assert "quarznet15x5" in said
    assert "did you mean quartznet15x5?" in said
    said = mistake("train", "asr", "--epochs", 1)
    assert "--train-manifest" in said
    said = mistake("train", "asr", "--network", "quarznet15x5", "--lr", -1)
    assert "--lr" in said
    assert "did you mean quartznet15x5?" in said
    said = mistake(*typed(folder, "--epochs", 1, "--train-manifest", folder / "trian.json"))
    assert "trian.json: there is no such file" in said
    assert f"did you mean {folder / 'train.json'}?" in said


def test_a_run_without_validation_sets_says_what_to_name(folder: Path, shown: Type, mistake: Type) -> None:
    run = folder / "unseen"
    words = ["train", "asr", "--network", folder / "network.yaml", "--train-manifest", folder / "dev.json"]
    shown(*words, "--epochs", 1, "--device", "cpu", "--workers", 0, "--out", run, "--loggers", "none")
    said = mistake("eval", run, "--checkpoint", "last", "--device", "cpu")
    assert "paceline eval RUN --manifest" in said
    said = mistake("infer", run, "--checkpoint", "last", "--device", "cpu")
    assert "paceline infer RUN a.flac" in said


# -- bad data ----------------------------------------------------------------------------------------------------------


def test_bad_data_stops_all_ranks_with_one_message(folder: Path, mistake: Type, tmp_path: Path) -> None:
    lines = tiny.lines_of(folder / "train.json")
    for line in lines:
        line["audio_filepath"] = str(folder / line["audio_filepath"])
    absent = [{**lines[0], "audio_filepath": f"gone-{number}.flac"} for number in range(30)]
    bad = tiny.manifest(tmp_path / "bad.json", [*lines, "{", *absent])
    words = typed(folder, "--epochs", 1, "--out", tmp_path / "run")
    words[words.index("--train-manifest") + 1] = bad
    said = mistake(*words)
    assert said.startswith(f"error: 31 bad lines in {bad}\n")
    assert f"{bad}:49: is not JSON" in said
    assert f"{bad}:68: " in said
    assert f"{bad}:69: " not in said
    assert "... and 11 more" in said
    assert "--bad-data skip" in said
    two = run_command([*map(str, words), "--procs", "2"])
    assert two.code == 2
    assert "Traceback" not in two.err
    assert two.err.count("31 bad lines in") == 1
    assert two.err[two.err.index("error: ") :].strip().startswith(said.strip())
    assert not (tmp_path / "run").exists()


# -- packages ----------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    with Forked("tests.recipes.speech.without_soundfile", []) as process:
        _, error = process.communicate(timeout=60.0)
    assert process.returncode == 2
    assert error == (
        "error: the recipe 'asr' needs the package soundfile, which is not installed\n  pip install 'paceline[asr]'\n"
    )


def test_only_packages_of_extras_are_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> Callable[[str], Any]:
        def raises(name: str) -> Any:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

        return raises

    for package, extra in {"soxr": "asr", "rapidfuzz.distance": "asr", "sklearn": "demo"}.items():
        monkeypatch.setattr(importlib, "import_module", absent(package))
        with pytest.raises(PackagesMissing) as caught:
            find_task("asr")
        assert caught.value.hint == f"pip install 'paceline[{extra}]'"
    monkeypatch.setattr(importlib, "import_module", absent("paceline.recipes.speech.absent"))
    with pytest.raises(ModuleNotFoundError):
        find_task("asr")

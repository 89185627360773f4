"""`python -m worker doctor`: the start-up checks of a tokenizer alone, for people and programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.unit.tito.families import toyvocab
from worker.doctor import FIT, REFUSED, USAGE, main
from worker.tito.families import FAMILIES

pytestmark = pytest.mark.xdist_group("tito")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no rollstream.toml here


def _asked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main([*argv, "--json"])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, said


def test_doctor_says_what_it_proved_and_every_familys_proof(
    vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = _asked(capsys, "--tokenizer", str(vocabulary))
    assert (code, said["ok"], said["error"]) == (FIT, True, None)
    assert (said["renderer"], said["resolved"], said["proof"]) == ("auto", "qwen3", "verified")
    assert [check["message"] for check in said["checks"]] == [2, 5, 7, 9] * 2
    assert {check["kind"] for check in said["checks"]} == {"equal", "append-only"}
    assert [(row["name"], row["proof"], row["note"]) for row in said["families"]] == [
        (name, str(family.proof), family.note) for name, family in FAMILIES.items()
    ]


def test_doctor_prints_the_same_for_people(
    vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--tokenizer", str(vocabulary)])
    text = capsys.readouterr().out
    assert re.match(r"fit +in \d", text)
    assert text.count("--families") == 1
    assert "glm-4.5" not in text
    assert "renderer   auto -> qwen3\n" in text
    assert "behind message 7 (with reasoning), user: append-only" in text
    for argv in (["--families", "--tokenizer", str(vocabulary)], []):
        main(argv)
        text = capsys.readouterr().out
        assert text.startswith(("fit ", "NOTHING    no tokenizer"))
        for name, family in FAMILIES.items():
            assert re.search(rf"^  {re.escape(name)} +{family.proof}", text, re.MULTILINE)


def test_doctor_refuses_a_vocabulary_of_another_family(
    vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tokenizer", str(vocabulary), "--renderer", "qwen3.5"]) == REFUSED
    said = capsys.readouterr().out
    assert said.startswith("REFUSED    model.tokenizer")
    assert "<|endoftext|> has id 151643, expected id 248044" in said


def test_doctor_reads_the_usual_configuration(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = f'[model]\ntokenizer = "{vocabulary}"\nrenderer = "qwen3-no-thinking"\n'
    (tmp_path / "rollstream.toml").write_text(table)
    code, said = _asked(capsys)
    assert (code, said["resolved"]) == (FIT, "qwen3-no-thinking")
    code, said = _asked(capsys, "--model.renderer", "qwen")
    assert (code, said["ok"]) == (REFUSED, False)
    assert "did you mean 'qwen3'" in said["error"]


def test_doctor_tries_a_models_own_template(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(vocabulary)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
                "{% endif %}",
            }
        )
    )
    code, said = _asked(capsys, "--tokenizer", str(tmp_path), "--renderer", "template")
    assert (code, said["resolved"]) == (FIT, "template")
    assert any("closed by <|im_end|>" in fact for fact in said["facts"])


@pytest.mark.parametrize(
    "argv", [[], ["--renderer", "qwen3"], ["--nonsense"], ["--model.nonsense", "1"]]
)
def test_doctor_ends_with_2_when_there_is_nothing_to_look_at(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == USAGE
    said = capsys.readouterr()
    assert "no tokenizer: give --tokenizer" in said.out or "error:" in said.err


def test_doctor_ends_with_2_when_the_tokenizer_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in (tmp_path, tmp_path / "none" / "x", tmp_path / "tokenizer.json"):
        assert main(["--tokenizer", str(missing), "--renderer", "qwen3"]) == USAGE
        assert capsys.readouterr().out.startswith("NOTHING    model.tokenizer: no file")


def test_doctor_warns_of_tools_that_the_model_is_not_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toyvocab.vocabulary("deepseek-v3").save(str(tmp_path / "tokenizer.json"))
    argv = ["--tokenizer", str(tmp_path), "--renderer", "deepseek-v3"]
    code, said = _asked(capsys, *argv, "--worker.tools", '["calculator"]')
    assert code == FIT
    assert ["calculator" in warning for warning in said["warnings"]] == [True]
    main(argv)
    assert "\nWARNING    tools (none is configured): " in capsys.readouterr().out
    toyvocab.vocabulary("kimi-k2").save(str(tmp_path / "tokenizer.json"))
    code, said = _asked(capsys, "--tokenizer", str(tmp_path), "--renderer", "kimi-k2")
    assert (code, said["warnings"]) == (FIT, [])


def test_doctor_is_a_command_of_the_worker_that_needs_no_server(tmp_path: Path) -> None:
    toy.write_toy_tokenizer(tmp_path)
    command = [sys.executable, "-m", "worker", "doctor", "--tokenizer", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == REFUSED, done.stderr
    assert "must be told" in json.loads(done.stdout)["error"]

"""Files of prompts."""

from __future__ import annotations

import pytest

from refengine.golden.files import GoldenFileError
from refengine.golden.prompts import Prompt, read_prompts


def test_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\n  def f(): \n", encoding="utf-8")
    assert read_prompts(file) == [Prompt("case-001", "Once upon a time"), Prompt("case-003", "  def f(): ")]


def test_objects_have_names_tokens_and_lengths(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"name": "a", "prompt": "x\\ny", "n_predict": 3}\n{"tokens": [1, 2]}\n')
    assert read_prompts(file) == [Prompt("a", "x\ny", None, 3), Prompt("case-002", None, (1, 2))]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "has 0 prompts"),
        ("{", "line 1 is no JSON"),
        ("[]", "line 1 is []; want an object"),
        ('{"prompt": "a", "tokens": [1]}', "line 1 has prompt, tokens; want prompt or tokens"),
        ("{}", "line 1 has nothing"),
        ('{"prompt": "a", "temperature": 1}', "line 1 has prompt, temperature"),
        ('{"prompt": 3}', "line 1.prompt is 3; want text"),
        ('{"tokens": ["a"]}', "want whole numbers"),
        ('{"prompt": "a", "name": "a/b"}', "line 1.name is 'a/b'; want letters"),
        ('{"prompt": "a", "name": "a"}\n{"prompt": "b", "name": "a"}', "two prompts are called a"),
        ("[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, text, wanted):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(GoldenFileError) as raised:
        read_prompts(file)
    assert wanted in str(raised.value)


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"ab\xff")
    with pytest.raises(GoldenFileError, match="is not UTF-8: invalid start byte at byte 2"):
        read_prompts(file)
    with pytest.raises(GoldenFileError, match="cannot be read"):
        read_prompts(tmp_path / "none")

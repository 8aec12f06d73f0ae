"""Flags of llama.cpp that are not here."""

from __future__ import annotations

import pytest

from cli.generate import generate as command
from cli.refused import REFUSED

NAMES = [(name, each) for each in REFUSED for name in each.names]
ACCEPTED = (
    "--jinja",
    "-no-cnv",
    "--no-conversation",
    "--no-context-shift",
    "--no-display-prompt",
    "--no-escape",
)


@pytest.mark.parametrize(("name", "refused"), NAMES, ids=[name for name, _ in NAMES])
def test_a_flag_is_refused_by_name_whatever_follows_it(generate, one_line, name, refused):
    for value in ([], ["99"], ["-1"], ["-p", "a"]):
        line = one_line(generate("-p", "a", name, *value), 2)
        assert name in line
        assert line.endswith(refused.reason)


def test_a_long_flag_with_its_value_attached_is_refused_too(generate, one_line):
    assert "--lora" in one_line(generate("-p", "a", "--lora=x.gguf"), 2)


def test_a_flag_in_the_place_of_a_value_is_a_value(generate, one_line):
    assert "'--mlock': no such file" in one_line(generate("-p", "a", model="--mlock"), 2)


@pytest.mark.parametrize(
    ("flag", "new"), [("--draft", "max"), ("--draft-max", "max"), ("--draft-min", "min")]
)
def test_removed_draft_flags_name_what_replaced_them(generate, one_line, flag, new):
    assert one_line(generate("-p", "a", flag, "3"), 2).endswith(f"--spec-draft-n-{new}")


def test_the_draft_flag_that_is_still_an_alias_is_accepted(generate):
    assert generate("-p", "the", "-n", "1", "--draft-p-min", "0").exit_code == 0


def test_no_flag_is_refused_and_known():
    known = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    assert len(known) == len(set(known))


def test_several_sequences_are_refused(generate, one_line):
    assert "-np/--parallel" in one_line(generate("-p", "a", "-np", "2"), 2)


def test_what_the_engine_has_not_built_is_refused_by_the_engine(generate, one_line):
    line = one_line(generate("-p", "a", "--fast"), 2)
    assert "fast=True" in line
    assert "not built yet" in line


def test_a_gpu_that_is_not_there_is_bad_input(generate, one_line):
    # With a driver and without one.
    assert "device cuda" in one_line(generate("-p", "a", "-dev", "cuda:99"), 2)


def test_flags_that_say_what_is_so_anyway_are_accepted(generate):
    result = generate("-p", "the", "-n", "1", "-np", "1", *ACCEPTED)
    assert result.exit_code == 0, result.stderr

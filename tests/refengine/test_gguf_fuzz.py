from __future__ import annotations

import random
import tracemalloc
from contextlib import contextmanager

import pytest
from malformed_gguf import tiny_llama

from refengine.config import ModelConfig, check_tensors, expected_tensors
from refengine.errors import ModelFileError, UnsupportedModelError
from refengine.gguf_file import GGUFFile

N_MUTATIONS = 2000
INTERESTING = [0, 1, 2, 7, 8, 9, 13, 31, 32, 63, 64, 127, 128, 255]


def flip(rng: random.Random, content: bytearray, end: int) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(end)] ^= 1 << rng.randrange(8)


def set_byte(rng: random.Random, content: bytearray, end: int) -> None:
    content[rng.randrange(end)] = rng.choice(INTERESTING)


def truncate(rng: random.Random, content: bytearray, end: int) -> None:
    del content[rng.randrange(end) :]


def cut(rng: random.Random, content: bytearray, end: int) -> None:
    start = rng.randrange(end)
    del content[start : start + rng.choice([1, 4, 8, 32])]


def insert(rng: random.Random, content: bytearray, end: int) -> None:
    start = rng.randrange(end)
    content[start:start] = rng.randbytes(rng.choice([1, 4, 8, 32]))


def splice_ones(rng: random.Random, content: bytearray, end: int) -> None:
    start, length = rng.randrange(end), rng.choice([1, 2, 4, 8, 16])
    content[start : start + length] = b"\xff" * length


def copy_within(rng: random.Random, content: bytearray, end: int) -> None:
    start, to, length = rng.randrange(end), rng.randrange(end), rng.choice([4, 8, 16, 64])
    content[to : to + length] = content[start : start + length]


MUTATIONS = [flip, set_byte, truncate, cut, insert, splice_ones, copy_within]


@contextmanager
def traced():
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def check_message(error: Exception) -> None:
    assert str(error).isprintable(), str(error)
    assert len(str(error)) < 1000


def load(path) -> str:
    """Do all that loading does before weights are used; return how it ended."""
    with GGUFFile.open(path) as file:
        for name, info in file.tensors.items():
            assert file.raw(name).size == info.nbytes
            file.release_pages(name)
        assert len(dict(file.metadata)) == len(file.metadata)
        try:
            config = ModelConfig.from_gguf(file)
            check_tensors(file, config)
        except (ModelFileError, UnsupportedModelError) as err:
            check_message(err)
            return "opened"
        assert set(expected_tensors(config)) == set(file.tensors)
        return "loaded"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_mutated_file_loads_or_is_refused(tmp_path, mutate, arch):
    rng = random.Random(f"{arch} {mutate.__name__}")
    sound = tiny_llama(arch).build()
    header_end = len(
        sound.rstrip(b"\0")
    )  # all weights are zeros; beyond the header most changes mean nothing
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    assert load(path) == "loaded"
    ends = {"loaded": 0, "opened": 0, "refused": 0}
    for index in range(N_MUTATIONS // len(MUTATIONS) // 2 + 1):
        content = bytearray(sound)
        mutate(rng, content, header_end if rng.random() < 0.95 else len(content))
        path.write_bytes(content)
        with traced():
            try:
                end = load(path)
            except (ModelFileError, UnsupportedModelError) as err:
                check_message(err)
                end = "refused"
            peak = tracemalloc.get_traced_memory()[1]
        assert peak <= 2 * len(content) + 65536, (index, peak)
        ends[end] += 1
    assert ends["refused"] > 0, ends


def test_random_bytes_behind_a_sound_header_start(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "model.gguf"
    for _ in range(200):
        counts = bytes([rng.randrange(4), *[0] * 7, rng.randrange(4), *[0] * 7])
        path.write_bytes(b"GGUF\3\0\0\0" + counts + rng.randbytes(rng.randrange(400)))
        try:
            load(path)
        except ModelFileError as err:
            check_message(err)

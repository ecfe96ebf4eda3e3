"""Settings: sizes, files, and errors that name the file and the key."""

from __future__ import annotations

import pytest

import kvstore
from kvstore import config
from kvstore.clock import FakeClock
from kvstore.config import (
    CAPACITY_BYTES_MIN,
    Config,
    DramConfig,
    StoreConfig,
    available_memory_bytes,
    load,
    memory_limit_bytes,
    parse_bytes,
)
from kvstore.errors import ConfigError

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("0", 0),
        ("4096", 4096),
        ("512 MiB", 512 * MIB),
        (" 8GiB ", 8 * 1024 * MIB),
        ("8gib", 8 * 1024 * MIB),
        ("8GB", 8_000_000_000),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_have_units(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "1 M", "1 PiBs", "0x10", "1,5MiB", True])
def test_what_is_no_size_is_named(text):
    with pytest.raises(
        ConfigError, match="is no size: write a number of bytes, or one with a unit"
    ):
        parse_bytes(text)


def test_open_takes_a_capacity_in_each_form(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text('[dram]\ncapacity_bytes = "3MiB"\n', encoding="utf-8")
    for given, options in (
        (path, {}),
        (str(path), {}),
        (load(path), {}),
        (Config(dram=DramConfig(capacity_bytes=3 * MIB)), {}),
        (None, {"dram_capacity_bytes": "3MiB"}),
        (None, {"dram_capacity_bytes": 3 * MIB}),
        (Config(dram=DramConfig(capacity_bytes="1MiB")), {"dram_capacity_bytes": 3 * MIB}),
    ):
        with kvstore.open(given, clock=FakeClock(), **options) as store:
            assert store.check().capacity_bytes == 3 * MIB


def test_a_capacity_is_cut_to_whole_slots():
    with kvstore.open(dram_capacity_bytes=MIB + 4095, clock=FakeClock()) as store:
        assert store.check().capacity_bytes == MIB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[dram]\ncapacity_byte = 1\n", "no setting 'capacity_byte'; did you mean 'capacity_byt"),
        ("[dram]\nx = 1\n", "no setting 'x'; there are capacity_bytes"),
        ("[drum]\ncapacity_bytes = 1\n", r"no table \[drum\]; did you mean 'dram'"),
        ('[dram]\ncapacity_bytes = "many"\n', "'many' is no size"),
        ("[dram]\ncapacity_bytes = true\n", "capacity_bytes"),
        ("[dram]\ncapacity_bytes = 1.5\n", "capacity_bytes"),
        ("[dram]\ncapacity_bytes = -1\n", "'?-1'? is no size"),
        ('[store]\npolicy = "fifo"\n', "store.policy is 'fifo': allowed are 'lru', 'lru-r'"),
        ("dram = 3\n", r"dram is 3: it is a table, \[dram\]"),
        ("[dram\n", r"(?i)expected"),
        ("[dram]\ncapacity_bytes = 1\ncapacity_bytes = 2\n", "overwrite"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, message):
    path = tmp_path / "kvstore.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        kvstore.open(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(ConfigError, match=path.name):
            load(path)


@pytest.mark.parametrize("capacity", [0, 4096, CAPACITY_BYTES_MIN - 1, "1MB"])
def test_a_capacity_below_the_smallest_is_refused(capacity):
    with pytest.raises(ConfigError, match=r"dram\.capacity_bytes is .*: the smallest is 1MiB"):
        kvstore.open(dram_capacity_bytes=capacity)


def test_a_capacity_beyond_this_machine_is_refused():
    with pytest.raises(
        ConfigError, match=r"\(900 TiB\), and only [\d.]+ GiB of memory are available"
    ):
        kvstore.open(dram_capacity_bytes="900TiB")


@pytest.mark.parametrize("given", ["8GiB", " 512 mib "])
def test_a_size_where_a_file_belongs_is_told_where_to_go(given):
    with pytest.raises(ConfigError, match=r"is a size.*dram_capacity_bytes="):
        kvstore.open(given)


@pytest.mark.parametrize("given", [3, b"x", {}, object()])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(ConfigError, match=r"config is of type .*: give a path or a Config"):
        kvstore.open(given)


@pytest.mark.parametrize("capacity", [True, 1.5, b"1MiB", []])
def test_what_is_no_capacity_is_refused(capacity):
    with pytest.raises(ConfigError, match="give bytes or a size"):
        kvstore.open(dram_capacity_bytes=capacity)


def test_a_policy_that_is_not_there_is_refused():
    wrong = Config(store=StoreConfig(policy="fifo"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        kvstore.open(wrong, dram_capacity_bytes="1MiB")


class TestMachine:
    """Limits of this process, as the kernel says them."""

    @pytest.fixture
    def files(self, monkeypatch):
        files = {
            "/proc/self/cgroup": "0::/a/b\n",
            "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
        }
        monkeypatch.setattr(config, "_read", lambda path: files.get(str(path), ""))
        return files

    def test_the_tightest_group_above_counts(self, files):
        files["/sys/fs/cgroup/a/memory.max"] = f"{64 * MIB}\n"
        files["/sys/fs/cgroup/a/memory.current"] = f"{60 * MIB}\n"
        files["/sys/fs/cgroup/a/memory.stat"] = f"anon 1\ninactive_file {16 * MIB}\n"
        files["/sys/fs/cgroup/a/b/memory.max"] = "max\n"
        files["/sys/fs/cgroup/a/b/memory.current"] = f"{MIB}\n"
        assert memory_limit_bytes() == 64 * MIB
        assert available_memory_bytes() == 20 * MIB, "page cache is given back on demand"
        assert Config().dram_capacity_bytes() == 64 * MIB // 10

    def test_without_limits_it_is_the_machines(self, files):
        assert available_memory_bytes() == 4 * 1024 * MIB
        files.clear()
        assert available_memory_bytes() == memory_limit_bytes()

    def test_more_than_all_is_used_is_nothing_left(self, files):
        files["/sys/fs/cgroup/memory.max"] = f"{MIB}\n"
        files["/sys/fs/cgroup/memory.current"] = f"{2 * MIB}\n"
        assert available_memory_bytes() == 0
        assert Config().dram_capacity_bytes() == CAPACITY_BYTES_MIN

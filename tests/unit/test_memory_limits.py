"""The memory that a process may use, from trees as kernels and containers show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import CAPACITY_BYTES_MIN, Config
from kvstore.errors import ConfigError
from kvstore.memory_limits import available_memory_bytes, memory_limit

MIB = 1024 * 1024
#: What version 1 says for "no limit": the largest number, rounded to pages.
V1_NO_LIMIT = 9223372036854771712

MACHINE = {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n"}  # 8 GiB, 4 free


@pytest.fixture
def tree(tmp_path: Path):
    """Writes files into a root of its own, and returns that."""

    def write(files: dict[str, object]) -> Path:
        for name, text in {**MACHINE, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="ascii")
        return tmp_path

    return write


def v2(group: str, limit: object, used: int, inactive_file: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive_file}",
    }


def v1(group: str, limit: object, used: int, inactive_file: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}",
    }


def test_version_2_the_tightest_group_above_counts(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/a/b",
            **v2("/a", 64 * MIB, 60 * MIB, inactive_file=16 * MIB),
            **v2("/a/b", "max", MIB),
        }
    )
    limit_bytes, origin = memory_limit(root)
    assert limit_bytes == 64 * MIB
    assert origin == f"the limit in {root}/sys/fs/cgroup/a/memory.max"
    assert available_memory_bytes(root) == 20 * MIB, "page cache is given back on demand"
    assert Config().dram_capacity_bytes(root) == 64 * MIB // 10


def test_version_1_the_tightest_group_above_counts(tree):
    root = tree(
        {
            "proc/self/cgroup": "11:cpu,cpuacct:/c\n4:memory:/docker/abc\n1:name=systemd:/d",
            **v1("/docker/abc", 96 * MIB, 32 * MIB, inactive_file=8 * MIB),
            **v1("/docker", 128 * MIB, 124 * MIB),
            **v1("", V1_NO_LIMIT, 500 * MIB),
        }
    )
    limit_bytes, origin = memory_limit(root)
    assert limit_bytes == 96 * MIB
    assert origin.endswith("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes")
    assert available_memory_bytes(root) == 4 * MIB, "the group above has less room left"


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/../../kubepods/pod7/abc", v2("", 64 * MIB, MIB)),
        ("4:cpu,memory:/kubepods/pod7/abc", v1("", 64 * MIB, MIB)),
        ("", v2("", 64 * MIB, MIB)),
        ("", v1("", 64 * MIB, MIB)),
    ],
    ids=["v2", "v1", "v2 without proc", "v1 without proc"],
)
def test_a_container_sees_its_group_as_the_root(tree, groups, files):
    root = tree({"proc/self/cgroup": groups, **files})
    assert memory_limit(root).limit_bytes == 64 * MIB
    assert available_memory_bytes(root) == 63 * MIB


def test_a_hybrid_system_has_the_limit_of_either(tree):
    root = tree({"proc/self/cgroup": "4:memory:/x\n0::/x", **v1("/x", 64 * MIB, MIB)})
    assert memory_limit(root).limit_bytes == 64 * MIB


def test_groups_of_other_controllers_and_names_do_not_count(tree):
    root = tree(
        {
            "proc/self/cgroup": "3:cpu:/memory:x\n2:name=memory:/y\n1:hugetlb:/z",
            **v1("/x", MIB, 0),
            **v1("/y", MIB, 0),
            **v1("/z", MIB, 0),
        }
    )
    assert memory_limit(root).limit_bytes == 8 * 1024 * MIB


def test_no_limit_is_the_machine(tree):
    for files in (
        {},
        {"proc/self/cgroup": "0::/", **v2("", "max", MIB)},
        {"proc/self/cgroup": "4:memory:/", **v1("", V1_NO_LIMIT, MIB)},
    ):
        root = tree(files)
        assert memory_limit(root) == (8 * 1024 * MIB, "this machine's memory")
        assert available_memory_bytes(root) == 4 * 1024 * MIB


def test_what_cannot_be_read_is_asked_of_the_system(tmp_path):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(tmp_path).limit_bytes == available_memory_bytes(tmp_path) == physical
    (tmp_path / "proc/meminfo").mkdir(parents=True)  # a directory is no file
    assert memory_limit(tmp_path).limit_bytes == physical


def test_more_than_all_is_used_is_nothing_left(tree):
    root = tree({"proc/self/cgroup": "0::/", **v2("", MIB, 2 * MIB)})
    assert available_memory_bytes(root) == 0
    assert Config().dram_capacity_bytes(root) == CAPACITY_BYTES_MIN


def test_a_share_that_is_not_available_is_refused_with_what_it_is_of(tree):
    root = tree({"proc/self/cgroup": "0::/", **v2("", 1000 * MIB, 990 * MIB)})
    with pytest.raises(
        ConfigError,
        match=r"capacity_bytes is 100 MiB \(10% of 1000 MiB, the limit in .*memory\.max\), and "
        r"only 10 MiB of memory are available here: give less",
    ):
        Config().dram_capacity_bytes(root)


def test_this_machine_has_memory():
    assert 0 < available_memory_bytes() <= memory_limit().limit_bytes

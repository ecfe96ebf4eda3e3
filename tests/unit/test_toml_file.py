"""Files of settings: where something stands, what is no TOML, and what cannot be read."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.config import Config, load
from kvstore.config.sources import Source, resolve
from kvstore.config.toml_file import FILE_BYTES_MAX, read
from kvstore.errors import ConfigError
from tests.config_problems import problems

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, so that messages have short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def as_nobody():
    """Within its `with` block, root is somebody who may not read everything."""

    @contextmanager
    def nobody():
        if os.geteuid() != 0:
            yield
            return
        try:
            os.seteuid(65534)
        except OSError:
            pytest.skip("there is no other user in this container")
        try:
            yield
        finally:
            os.seteuid(0)

    return nobody()


class TestLines:
    """The line is where the setting begins, and not where something looks like it."""

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ('a = """\n[dram]\nx = 1\n"""\n[dram]\nx = 2', 6),
            ("# x = 1\n[dram]\nx = 1", 3),
            ("[store]\npolicy = 'x'\n[dram]\n'x' = [\n1,\n'x',\n]", 4),
            ("[dram]\ncapacity_bytes = 'x'\n\nxx = 1\nx = 1", 5),
            ("dram = { capacity_bytes = '1MiB', x = 1 }", 1),
            ("\ndram.x = 1", 2),
            ("[dram]\r\n\r\nx = 1\r\n", 3),
        ],
    )
    def test_of_a_setting(self, folder, text, line):
        assert f"a.toml:{line}: dram.x is no setting; [dram] has capacity_bytes" in problems(text)

    def test_is_left_out_where_it_is_not_found(self, folder):
        assert problems('[dram]\n"\\u0078" = 1\n')[0].startswith("a.toml: dram.x is no setting")


class TestNoToml:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[dram]\ncapacity_bytes = 8GiB # much\n",
                ':2: a value with letters or a unit goes in quotes: capacity_bytes = "8GiB"',
            ),
            (
                "[store]\nleased_fraction = 50%",
                ':2: a value with letters or a unit goes in quotes: leased_fraction = "50%"',
            ),
            (
                "[store]\npolicy = lru-r\n",
                ':2: a value with letters or a unit goes in quotes: policy = "lru-r"',
            ),
            ("a = True\n", ":1: true and false are written small: a = true"),
            (
                "dram:\n  capacity_bytes: 1\n",
                ":1: this is neither [table] nor name = value: dram:",
            ),
            ("[store]\npolicy =\n", ":2: there is no value: policy ="),
            ('[store]\npolicy = "lru\n', ':2: a quote is not closed: policy = "lru'),
            ("[dram]\na = 1\na = 1\n", ":3: a stands here for the second time"),
            ("[dram]\n[dram]\n", ":2: the table stands here for the second time: [dram]"),
            ("[dram]\n\x00\n", ':2: this is neither [table] nor name = value: "\\x00"'),
        ],
    )
    def test_common_mistakes_are_told_in_plain_words(self, folder, text, message):
        assert problems(text) == [f"a.toml{message}"]

    @pytest.mark.parametrize(
        "text", ["[dram\n", "[]\n", "policy == 1\n", "[a] b = 1\n", "a = “b”\n", "a = .5.5.\n"]
    )
    def test_others_have_their_line(self, folder, text):
        (line,) = problems(f"\n{text}")
        assert line.startswith("a.toml:2: ")
        assert line.endswith(text.strip())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a = [1,\n", "this is no TOML at its end: "),
            ("a = '''x\n", "a quote is not closed"),
            ("a = 'x\n", "a quote is not closed"),
        ],
    )
    def test_an_end_in_the_midst_is_told(self, folder, text, message):
        (line,) = problems(text)
        assert line.startswith(f"a.toml: {message}")

    @pytest.mark.parametrize("text", [f"a = {'[' * 5000}", f"a = {'9' * 5000}"])
    def test_values_that_python_cannot_read(self, folder, text):
        (line,) = problems(text)
        assert line.startswith("a.toml")

    @given(
        st.binary(max_size=200)
        | st.text(max_size=200)
        | st.text(alphabet="[]{}=.,\"'#%\n dramstoe1", max_size=60)
    )
    def test_whatever_stands_in_a_file_is_a_config_or_a_config_error(self, tmp_path_factory, text):
        path = tmp_path_factory.getbasetemp() / "any.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        lines: list[str] = []
        try:
            config = load(path, {})
        except ConfigError as error:
            config, lines = Config(), str(error).split("\n")
        assert config == Config()
        for line in lines:
            assert path.name in line
            assert line.isprintable()


class TestFiles:
    def test_one_without_settings_is_the_defaults(self, folder):
        for content in (b"", b"\n# nothing\n", BOM, b"[dram]\n[store]\n"):
            (folder / "a.toml").write_bytes(content)
            assert load("a.toml", {}) == load(None, {}) == Config()

    @pytest.mark.parametrize("start", [b"", BOM])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    def test_of_other_systems_are_read(self, folder, start, end):
        lines = [b"[store]", b'policy = "lru-r"', b""]
        (folder / "a.toml").write_bytes(start + end.join(lines))
        resolved = resolve(Config, "a.toml", {})
        assert resolved.config.store.policy == "lru-r"
        assert resolved.sources["store.policy"] == Source("file", "a.toml:2")

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", "a = 'é'".encode("latin-1")])
    def test_what_is_no_text_has_its_line(self, folder, content):
        assert problems(b"#\n" + content) == [
            "a.toml:2: this is no text in UTF-8, as TOML has to be"
        ]

    def test_one_that_cannot_be_read_is_named(self, folder):
        (folder / "folder").mkdir()
        for path, message in (
            ("none.toml", "cannot read none.toml: No such file or directory"),
            ("folder", "cannot read folder: Is a directory"),
            ("/proc/self/mem", "cannot read /proc/self/mem: Input/output error"),
            ("a\0b", 'cannot read "a\\x00b": no file can have this name'),
            ("\ud800", 'cannot read "\\ud800": no file can have this name'),
            ("", "the name of the configuration file is empty"),
            ("/dev/zero", "/dev/zero is larger than 256 KiB: it is no file of settings"),
        ):
            with pytest.raises(ConfigError) as error:
                kvstore.open(path)
            assert str(error.value) == message

    def test_one_without_permission_is_named(self, folder, as_nobody):
        (folder / "a.toml").touch(mode=0o000)
        with (
            as_nobody,
            pytest.raises(ConfigError, match=r"^cannot read a\.toml: Permission denied$"),
        ):
            load("a.toml", {})

    def test_a_name_with_odd_characters_stays_on_its_line(self, folder):
        path = folder / "a\n\udcff.toml"
        path.write_text("x = 1\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r'^".*a\\n\\udcff\.toml":1: x stands in no table'):
            load(path, {})

    def test_the_largest_file_is_read(self, folder):
        (folder / "a.toml").write_bytes(b"#" * FILE_BYTES_MAX)
        assert read("a.toml").tree == {}

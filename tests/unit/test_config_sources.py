"""A file and the environment: every mistake has its place, what is allowed, and the nearest."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from kvstore.config import Config, StoreConfig, kinds, load
from kvstore.config.sources import DEFAULT, Source, resolve
from kvstore.config.table import Spec, Table, settings_of
from kvstore.config.text import shown_settings
from kvstore.errors import ConfigError
from tests.config_problems import problems


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, so that messages have short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[dram]\ncapacity_byte = 1\n",
                "a.toml:2: dram.capacity_byte is no setting; did you mean dram.capacity_bytes?",
            ),
            ("[dram]\nx = 1\n", "a.toml:2: dram.x is no setting; [dram] has capacity_bytes"),
            ("\n[drum]\nx = 1\n", "a.toml:2: there is no table [drum]; did you mean [dram]?"),
            ("[ssd]\n", "a.toml:1: there is no table [ssd]; there are [dram], [store], [daemon]"),
            (
                '[store]\ncapacity-bytes = "8GiB"\n',
                "a.toml:2: store.capacity-bytes is no setting; did you mean dram.capacity_bytes?",
            ),
            (
                'policy = "lru"\n',
                "a.toml:1: policy stands in no table; did you mean policy under [store]?",
            ),
            ("x = 1\n", "a.toml:1: x stands in no table; there are [dram], [store], [daemon]"),
            ('["st\\nore"]\n', 'a.toml: there is no table ["st\\nore"]; did you mean [store]?'),
        ],
    )
    def test_in_a_file(self, folder, text, message):
        assert problems(text) == [message]

    @pytest.mark.parametrize(
        ("variable", "hint"),
        [
            ("DRAM__CAPACITY_BYTE", "did you mean KVSTORE_CFG_DRAM__CAPACITY_BYTES?"),
            ("DRAM_CAPACITY_BYTES", "did you mean KVSTORE_CFG_DRAM__CAPACITY_BYTES?"),
            ("CAPACITY_BYTES", "did you mean KVSTORE_CFG_DRAM__CAPACITY_BYTES?"),
            ("store__policy", "did you mean KVSTORE_CFG_STORE__POLICY?"),
            ("SERVICE_HOST", "`kvstore config init` lists what there is"),
            ("", "`kvstore config init` lists what there is"),
        ],
    )
    def test_in_the_environment(self, folder, variable, hint):
        environment = {"KVSTORE_PORT": "1", f"KVSTORE_CFG_{variable}": "1"}
        assert problems("", environment) == [f"KVSTORE_CFG_{variable} sets nothing; {hint}"]


class TestWrongValues:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (
                'policy = "LRU"',
                'policy is "LRU": give one of "lru", "lru-r", "lru-n", "credit"; '
                'did you mean "lru"?',
            ),
            ("policy = 3", 'policy is 3: give one of "lru", "lru-r", "lru-n", "credit"'),
            ("policy = true", 'policy is true: give one of "lru", "lru-r", "lru-n", "credit"'),
            (
                "leased_fraction = 50",
                'leased_fraction is 50: give a fraction from 1% to 100%, as in 0.5 or "50%"',
            ),
            (
                "leased_fraction = nan",
                'leased_fraction is nan: give a fraction from 1% to 100%, as in 0.5 or "50%"',
            ),
            (
                "lease_seconds_max = '90 min'",
                'lease_seconds_max is "90 min": give a duration from 1s to 1d, as in "90s", "5m" '
                'or "1h"',
            ),
            (
                "lease_seconds_max = 1979-05-27",
                'lease_seconds_max is 1979-05-27: give a duration from 1s to 1d, as in "90s", "5m" '
                'or "1h"',
            ),
            (
                "history_entries = 1.5",
                "history_entries is 1.5: give a whole number from 0 to 16777216",
            ),
            (
                "history_entries = '-1'",
                'history_entries is "-1": give a whole number from 0 to 16777216',
            ),
            (
                f"history_entries = {'9' * 90}",
                "history_entries is a number of too many digits: give a whole number from 0 to "
                "16777216",
            ),
            (
                "history_entries = {a = 1}",
                "history_entries is a table: give a whole number from 0 to 16777216",
            ),
            (
                f"history_entries = '{'x' * 90}'",
                f'history_entries is "{"x" * 58}…: give a whole number from 0 to 16777216',
            ),
        ],
    )
    def test_in_a_file(self, folder, line, message):
        assert problems(f"[store]\n\n{line}\n") == [f"a.toml:3: store.{message}"]

    def test_a_size_without_its_b(self, folder):
        (line,) = problems('[dram]\ncapacity_bytes = "8G"\n')
        assert line.startswith('a.toml:2: dram.capacity_bytes is "8G": give a size of 1MiB or more')
        assert line.endswith('; did you mean "8GiB" or "8GB"?')

    @pytest.mark.parametrize("value", ["", "1", "lru ", "\x1b[31m\udcff\n"])
    def test_in_the_environment(self, folder, value):
        (line,) = problems("", {"KVSTORE_CFG_STORE__POLICY": value})
        assert line.startswith("KVSTORE_CFG_STORE__POLICY is ")
        assert 'give one of "lru", "lru-r", "lru-n", "credit"' in line
        assert line.isprintable()

    def test_where_a_table_is_expected(self, folder):
        settings = "it is a table, [dram], with its settings below: capacity_bytes"
        assert problems("dram = 3\n") == [f"a.toml:1: dram is 3: {settings}"]
        assert problems("[[dram]]\n") == [f"a.toml:1: dram is a list: {settings}"]

    def test_nothing_of_the_libraries_own_words(self, folder):
        """Whatever stands where a value belongs, the message is ours."""
        for value in ("[]", "[1, 'a']", "{}", "07:32:00", "inf", "-0.0", "1e400", "'a'", '""'):
            for setting in settings_of(Config):
                (line,) = problems(f"[{setting.table}]\n{setting.key} = {value}\n")
                assert line.startswith(f"a.toml:2: {setting.name} is ")
                assert ": give " in line


class TestContradictions:
    def test_both_places_are_named(self, folder):
        text = "[store]\nwatermark_high = 0.8\n"
        assert problems(text) == [
            "store.watermark_low (default) is 90%, above store.watermark_high (a.toml:2), which is "
            "80%: lower the first or raise the second"
        ]
        (line,) = problems(text, {"KVSTORE_CFG_STORE__WATERMARK_LOW": "85%"})
        assert "watermark_low (KVSTORE_CFG_STORE__WATERMARK_LOW) is 85%, above" in line

    def test_sources_that_differ_are_none(self, folder):
        (folder / "a.toml").write_text("[store]\nwatermark_high = 0.8\n", encoding="utf-8")
        config = load("a.toml", {"KVSTORE_CFG_STORE__WATERMARK_HIGH": "95%"})
        assert config.store == StoreConfig(watermark_high=0.95)


class TestAllAtOnce:
    def test_a_line_for_each_problem_of_file_and_environment(self, folder):
        text = '[store]\nwatermark_hihg = 1\npolicy = "lur"\n[drum]\nx = 1\n'
        lines = problems(text, {"KVSTORE_CFG_X": "1", "KVSTORE_CFG_STORE__LEASED_FRACTION": "2"})
        assert [line.partition(" ")[0] for line in lines] == [
            "a.toml:2:",
            "a.toml:3:",
            "a.toml:4:",
            "KVSTORE_CFG_STORE__LEASED_FRACTION",
            "KVSTORE_CFG_X",
        ]

    def test_a_wrong_line_under_a_right_variable_is_still_wrong(self, folder):
        assert len(problems("[store]\npolicy = 1\n", {"KVSTORE_CFG_STORE__POLICY": "lru"})) == 1

    def test_another_programs_file_is_not_told_to_its_end(self, folder):
        lines = problems("".join(f"[tool{i}]\n" for i in range(50)))
        assert len(lines) == 21
        assert lines[-1] == "and 30 more"


class _SecretTable(Table, frozen=True, kw_only=True):
    """A table with a secret, as there will be one of passwords."""

    NAME = "remote"

    password: Annotated[
        str, Spec(kinds.choice({"": "none", "hunter2": "one"}), "A password.", is_secret=True)
    ] = ""


class _SecretTree(msgspec.Struct, frozen=True, kw_only=True):
    remote: _SecretTable = _SecretTable()


class TestSecrets:
    def test_are_neither_shown_nor_told(self, folder):
        variable = "KVSTORE_CFG_REMOTE__PASSWORD"
        for value, shown in (("hunter2", "not shown"), ("", "not set")):
            resolved = resolve(_SecretTree, None, {variable: value})
            assert resolved.config.remote.password == value
            (row,) = shown_settings(resolved, {})
            assert (row.value, row.shown, row.place) == (None, shown, variable)
        with pytest.raises(ConfigError) as error:
            resolve(_SecretTree, None, {variable: "hunter3"})
        assert str(error.value).startswith(f"{variable} is not shown: give one of")
        assert "hunter3" not in str(error.value)

    @pytest.mark.parametrize("value", ["hunter3", "'hunter3", "'hunter3'"])
    def test_are_not_told_from_a_file(self, folder, value):
        (folder / "a.toml").write_text(f"[remote]\npassword = {value}\n", encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            resolve(_SecretTree, "a.toml", {})
        assert str(error.value).startswith("a.toml:")
        assert "hunter3" not in str(error.value)


def test_the_source_of_each_value_is_known(folder):
    (folder / "a.toml").write_text(
        '[store]\npolicy = "lru"\nleased_fraction = 0.4\n', encoding="utf-8"
    )
    variable = "KVSTORE_CFG_STORE__LEASED_FRACTION"
    resolved = resolve(Config, "a.toml", {variable: "30%"})
    assert resolved.config.store.leased_fraction == 0.3
    set_here = {name: source for name, source in resolved.sources.items() if source != DEFAULT}
    assert set_here == {
        "store.policy": Source("file", "a.toml:2"),
        "store.leased_fraction": Source("environment", variable),
    }
    assert list(resolved.sources) == [setting.name for setting in settings_of(Config)]

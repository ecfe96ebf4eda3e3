"""The tree of settings in a program: what it accepts, and what `kvstore.open` makes of it."""

from __future__ import annotations

import msgspec
import pytest

import kvstore
from kvstore.clock import FakeClock
from kvstore.config import (
    CAPACITY_BYTES_MIN,
    Config,
    DramConfig,
    MemoryShare,
    StoreConfig,
    load,
)
from kvstore.config.table import ENVIRONMENT_PREFIX, settings_of, tables_of
from kvstore.errors import ConfigError
from kvstore.memory_limits import memory_limit
from kvstore.policy import POLICIES
from kvstore.settings import CoreSettings
from kvstore.types import SLOT_ALIGNMENT_BYTES

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Whoever runs the tests may have a store configured."""
    for setting in settings_of(Config):
        monkeypatch.delenv(setting.variable, raising=False)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text('[dram]\ncapacity_bytes = "3MiB"\n', encoding="utf-8")
    return path


def capacity_of(*given, **options) -> int:
    with kvstore.open(*given, clock=FakeClock(), **options) as store:
        capacity: int = store.check().capacity_bytes
        return capacity


def test_open_takes_a_capacity_in_each_form(path):
    for given, options in (
        (path, {}),
        (str(path), {}),
        (load(path), {}),
        (Config(dram=DramConfig(capacity_bytes=3 * MIB)), {}),
        (None, {"dram_capacity_bytes": "3MiB"}),
        (None, {"dram_capacity_bytes": 3 * MIB}),
    ):
        assert capacity_of(given, **options) == 3 * MIB


def test_an_argument_goes_before_the_environment_the_file_and_the_defaults(path, monkeypatch):
    empty = path.with_name("empty.toml")
    empty.touch()
    default = load(empty).dram_capacity_bytes()
    assert default == load().dram_capacity_bytes() == memory_limit().limit_bytes // 10
    assert capacity_of(path) == 3 * MIB
    monkeypatch.setenv("KVSTORE_CFG_DRAM__CAPACITY_BYTES", "5MiB")
    assert capacity_of(path) == capacity_of(empty) == capacity_of() == 5 * MIB
    assert capacity_of(path, dram_capacity_bytes="7MiB") == 7 * MIB
    assert capacity_of(dram_capacity_bytes="7MiB") == 7 * MIB


def test_a_config_is_an_argument_and_holds_as_it_is(monkeypatch):
    monkeypatch.setenv("KVSTORE_CFG_DRAM__CAPACITY_BYTES", "5MiB")
    monkeypatch.setenv("KVSTORE_CFG_NO_SUCH_THING", "1")
    config = Config(dram=DramConfig(capacity_bytes=3 * MIB))
    assert capacity_of(config) == 3 * MIB
    assert capacity_of(config, dram_capacity_bytes=MIB) == MIB


def test_variables_of_others_are_ignored(path, monkeypatch):
    monkeypatch.setenv("KVSTORE_PORT", "tcp://10.0.0.1:7070")
    monkeypatch.setenv("KVSTORE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVSTORE_DRAM__CAPACITY_BYTES", "5MiB")
    monkeypatch.setenv("kvstore_cfg_dram__capacity_bytes", "5MiB")
    assert capacity_of(path) == 3 * MIB


def test_a_share_of_the_memory_is_a_capacity():
    share = MemoryShare(0.001)
    whole_slots = int(memory_limit().limit_bytes * 0.001) // SLOT_ALIGNMENT_BYTES
    for given in ("0.1%", share):
        assert capacity_of(dram_capacity_bytes=given) == whole_slots * SLOT_ALIGNMENT_BYTES
    assert DramConfig().capacity_bytes == MemoryShare(0.1)


def test_a_capacity_is_cut_to_whole_slots():
    assert capacity_of(dram_capacity_bytes=MIB + 4095) == MIB


@pytest.mark.parametrize("capacity", [0, -1, 4096, CAPACITY_BYTES_MIN - 1, "1MB", "0.01%", "101%"])
def test_a_capacity_below_the_smallest_is_refused(capacity):
    with pytest.raises(
        ConfigError, match=r'^dram\.capacity_bytes is "?[-\d%MB.]+"?: give a size of 1MiB or more'
    ):
        kvstore.open(dram_capacity_bytes=capacity)


def test_a_capacity_beyond_this_machine_is_refused():
    with pytest.raises(
        ConfigError, match=r"is 900 TiB, and only [\d.]+ [GM]iB of memory are available here"
    ):
        kvstore.open(dram_capacity_bytes="900TiB")


@pytest.mark.parametrize("capacity", [True, 1.5, b"1MiB", [], MemoryShare(float("nan")), "many"])
def test_what_is_no_capacity_is_refused(capacity):
    with pytest.raises(ConfigError, match=r"dram\.capacity_bytes is .*: give a size of 1MiB or"):
        kvstore.open(dram_capacity_bytes=capacity)


@pytest.mark.parametrize("given", ["8GiB", " 512 mib "])
def test_a_size_where_a_file_belongs_is_told_where_to_go(given):
    with pytest.raises(ConfigError, match=r"is a size.*dram_capacity_bytes="):
        kvstore.open(given)


@pytest.mark.parametrize("given", [3, b"x", {}, object()])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(ConfigError, match=r"config is of type .*: give a path or a Config"):
        kvstore.open(given)


def test_a_table_in_a_program_says_all_that_is_wrong_with_it():
    with pytest.raises(ConfigError) as error:
        StoreConfig(policy="fifo", watermark_high=0.0, history_entries=-1)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        'store.policy is "fifo"',
        "store.watermark_high is 0.0",
        "store.history_entries is -1",
    ]
    assert 'give one of "lru", "lru-r", "lru-n", "credit"' in lines[0]


def test_a_table_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="dram is 3: give a DramConfig"):
        Config(dram=3)  # type: ignore[arg-type]


def test_watermarks_that_contradict_each_other_are_refused():
    assert StoreConfig(watermark_high=0.5, watermark_low=0.5).watermark_low == 0.5
    with pytest.raises(
        ConfigError,
        match=r"^store\.watermark_low is 90%, above store\.watermark_high, which is 80%: lower",
    ):
        StoreConfig(watermark_high=0.8)


def test_values_are_of_the_type_of_their_field_however_they_were_written(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        '[store]\nlease_seconds_max = "5m"\nleased_fraction = "25%"\nhistory_entries = "7"\n'
        "pin_seconds_max = 60\nhard_pin_fraction = 1\n",
        encoding="utf-8",
    )
    store = load(path, {}).store
    assert store == StoreConfig(
        lease_seconds_max=300.0,
        leased_fraction=0.25,
        history_entries=7,
        pin_seconds_max=60.0,
        hard_pin_fraction=1.0,
    )
    assert [type(value) for value in msgspec.structs.astuple(store)] == [
        str, *[float] * 6, int,
    ]  # fmt: skip


class TestCore:
    """What the core is told."""

    def test_the_defaults_are_those_of_the_core(self):
        assert Config().core_settings() == CoreSettings()

    def test_each_setting_reaches_it(self):
        settings = CoreSettings("lru-r", 0.8, 0.7, 0.6, 60.0, 0.1, 600.0, 7)
        assert all(mine != default for mine, default in zip(settings, CoreSettings(), strict=True))
        assert Config(store=StoreConfig(**settings._asdict())).core_settings() == settings

    def test_every_policy_can_be_asked_for(self, monkeypatch):
        for name in POLICIES:
            monkeypatch.setenv("KVSTORE_CFG_STORE__POLICY", name)
            assert load().core_settings().policy == name
            assert capacity_of(dram_capacity_bytes="1MiB") == MIB

    def test_a_watermark_evicts_in_an_open_store(self, namespace):
        """16 blocks fit: above the high one, 12, those of the least use go, down to 8."""
        config = Config(
            dram=DramConfig(capacity_bytes=MIB),
            store=StoreConfig(watermark_high=0.75, watermark_low=0.5),
        )
        size = namespace.layout.bytes_per_block(namespace.block_tokens)
        assert size * 16 == MIB
        with (
            kvstore.open(config, clock=FakeClock()) as store,
            store.session(namespace) as session,
        ):
            for first in range(13):
                keys = namespace.keys(range(first, first + namespace.block_tokens))
                assert session.put(keys, [bytes(size)]) == ["ok"]
            assert store.check().ready_bytes == MIB // 2


class TestTree:
    """Rules that each setting keeps, those to come as well."""

    def test_a_table_is_called_as_its_field(self):
        assert [table.NAME for table in tables_of(Config).values()] == list(tables_of(Config))

    def test_variables_are_of_capitals_and_never_two_alike(self):
        variables = [setting.variable for setting in settings_of(Config)]
        assert len(set(variables)) == len(variables) > 5
        for variable in variables:
            assert variable.startswith(ENVIRONMENT_PREFIX)
            assert variable == variable.upper()
            assert variable.removeprefix(ENVIRONMENT_PREFIX).count("__") == 1

    @pytest.mark.parametrize("setting", settings_of(Config), ids=lambda each: each.name)
    def test_a_setting_is_told_in_one_sentence_and_its_default_is_allowed(self, setting):
        kind = setting.spec.kind
        assert setting.spec.meaning.endswith(".")
        assert "\n" not in setting.spec.meaning
        assert kind.parse(setting.default) == setting.default
        assert kind.parse(kind.literal(setting.default).strip('"')) == setting.default
        assert kind.shown(setting.default)

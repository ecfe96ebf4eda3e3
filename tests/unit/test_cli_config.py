"""`kvstore config`: what holds and why, and a file to begin with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import main as cli
from kvstore.config import Config, StoreConfig, load
from kvstore.config.table import ENVIRONMENT_PREFIX, settings_of
from kvstore.config.text import commented_file
from kvstore.memory_limits import memory_limit

MIB = 1024 * 1024
#: A command in the help, whole on its line, and what is said of it.
EXAMPLE = re.compile(r"^  ((?:KVSTORE_\S+ )?kvstore config \S.*?)(?: {2,}.*)?$", re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, and nothing of ours in the environment."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, words: str) -> tuple[int, str, str]:
    code = cli.main(["config", *words.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(out: str) -> dict[str, tuple[str, str]]:
    """Setting -> (value, from), of the text."""
    lines = out.partition("\n\n")[2].splitlines()
    found = [re.split(r" {2,}", line) for line in lines]
    assert found[0] == ["setting", "value", "from"]
    return {name: (value, origin) for name, value, origin in found[1:]}


class TestShow:
    def test_without_anything_it_is_the_defaults(self, capsys):
        code, out, err = run(capsys, "show")
        assert (code, err) == (0, "")
        assert out.startswith("file         none named (--config FILE)\nenvironment  sets nothing")
        shown = rows(out)
        assert list(shown) == [setting.name for setting in settings_of(Config)]
        capacity, origin = shown.pop("dram.capacity_bytes")
        assert re.fullmatch(r"default: 10% of [\d.]+ [GMT]iB, .+", origin)
        assert re.fullmatch(r"[\d.]+ [GM]iB", capacity)
        assert shown["store.lease_seconds_max"] == ("1h", "default")
        assert shown.pop("daemon.socket")[1] == "default: the runtime directory"
        assert {origin for _, origin in shown.values()} == {"default"}

    def test_each_value_has_its_place(self, capsys, folder, monkeypatch):
        (folder / "a.toml").write_text(
            '[dram]\ncapacity_bytes = "1%"\n[store]\nwatermark_high = 0.95\npolicy = "lru"\n',
            encoding="utf-8",
        )
        monkeypatch.setenv("KVSTORE_CFG_STORE__POLICY", "lru-n")
        code, out, err = run(capsys, "show --config a.toml")
        assert (code, err) == (0, "")
        assert "\nenvironment  sets 1\n" in out
        assert out.startswith("file         a.toml, sets 2\n")
        shown = rows(out)
        assert shown["dram.capacity_bytes"][1].startswith("a.toml:2: 1% of ")
        assert shown["store.watermark_high"] == ("95%", "a.toml:4")
        assert shown["store.policy"] == ("lru-n", "KVSTORE_CFG_STORE__POLICY")

    def test_json_is_the_same_in_base_units(self, capsys, monkeypatch):
        monkeypatch.setenv("KVSTORE_CFG_STORE__LEASE_SECONDS_MAX", "5m")
        code, out, _ = run(capsys, "show --json")
        document = json.loads(out)
        assert code == 0
        assert (document["file"], document["findings"]) == (None, [])
        assert list(document["settings"]) == [setting.name for setting in settings_of(Config)]
        assert document["settings"]["store.lease_seconds_max"] == {
            "name": "store.lease_seconds_max",
            "value": 300.0,
            "unit": "seconds",
            "shown": "5m",
            "source": "environment",
            "place": "KVSTORE_CFG_STORE__LEASE_SECONDS_MAX",
            "computed_from": None,
        }
        capacity = document["settings"]["dram.capacity_bytes"]
        limit = memory_limit()
        assert capacity["value"] == limit.limit_bytes // 10
        assert capacity["computed_from"].endswith(limit.origin)

    def test_json_may_stand_anywhere(self, capsys):
        outputs = [run(capsys, words)[1] for words in ("show --json", "--json show")]
        cli.main(["--json", "config", "show"])
        assert len({*outputs, capsys.readouterr().out}) == 1

    def test_every_problem_is_a_line_and_the_exit_code_is_2(self, capsys, folder, monkeypatch):
        (folder / "a.toml").write_text("[drum]\n[store]\npolcy = 1\n", encoding="utf-8")
        monkeypatch.setenv("KVSTORE_CFG_STORE__POLICY", "lur")
        for words in ("show --config a.toml", "show --config a.toml --json"):
            code, out, err = run(capsys, words)
            assert (code, out) == (2, "")
            assert err.splitlines() == [
                "kvstore: a.toml:1: there is no table [drum]; did you mean [dram]?",
                "kvstore: a.toml:3: store.polcy is no setting; did you mean store.policy?",
                'kvstore: KVSTORE_CFG_STORE__POLICY is "lur": give one of "lru", "lru-r", '
                '"lru-n", "credit"; did you mean "lru"?',
            ]

    def test_what_this_machine_cannot_hold_is_a_finding(self, capsys, monkeypatch):
        monkeypatch.setenv("KVSTORE_CFG_DRAM__CAPACITY_BYTES", "900TiB")
        code, out, err = run(capsys, "show")
        assert code == 1
        assert rows(out)["dram.capacity_bytes"][0] == "900 TiB"
        assert err.startswith("kvstore: dram.capacity_bytes is 900 TiB, and only ")
        code, out, _ = run(capsys, "show --json")
        assert code == 1
        assert len(json.loads(out)["findings"]) == 1


class TestInit:
    def test_without_a_path_it_goes_to_the_output(self, capsys, folder):
        for words in ("init", "init -", "init --force"):
            assert run(capsys, words) == (0, commented_file(), "")
        assert json.loads(run(capsys, "init --json")[1]) == {"path": None, "text": commented_file()}
        assert list(folder.iterdir()) == []

    def test_it_writes_a_file_that_it_never_replaces_unasked(self, capsys, folder):
        path = folder / "a.toml"
        code, out, err = run(capsys, "init a.toml")
        assert (code, err) == (0, "")
        assert out == "a.toml is written; to check it: kvstore config show --config a.toml\n"
        assert path.read_text(encoding="utf-8") == commented_file()
        path.write_text("mine", encoding="utf-8")
        assert run(capsys, "init a.toml") == (
            2, "", "kvstore: a.toml is there already: --force replaces it\n",
        )  # fmt: skip
        assert path.read_text(encoding="utf-8") == "mine"
        code, out, _ = run(capsys, "init a.toml --force --json")
        assert json.loads(out) == {"path": "a.toml", "text": commented_file()}
        assert path.read_text(encoding="utf-8") == commented_file()

    def test_it_follows_no_link_to_nowhere(self, capsys, folder):
        (folder / "a.toml").symlink_to(folder / "b.toml")
        assert run(capsys, "init a.toml")[0] == 2
        assert not (folder / "b.toml").exists()

    @pytest.mark.parametrize(
        ("path", "code", "message"),
        [
            (".", 2, ". is a directory: name a file in it"),
            ("none/a.toml", 1, "cannot write none/a.toml: none is no directory"),
            ("/dev/full --force", 1, "cannot write /dev/full: No space left on device"),
        ],
    )
    def test_what_cannot_be_written_is_one_line(self, capsys, path, code, message):
        assert run(capsys, f"init {path}") == (code, "", f"kvstore: {message}\n")

    def test_the_file_is_all_defaults_as_it_is_and_uncommented(self, capsys, folder):
        run(capsys, "init a.toml")
        path = folder / "a.toml"
        assert load(path, {}) == Config()
        text, count = re.subn(r"^#(?=\w+ = )", "", commented_file(), flags=re.MULTILINE)
        assert count == len(settings_of(Config))
        path.write_text(text, encoding="utf-8")
        assert load(path, {}) == Config()
        assert run(capsys, "show --config a.toml")[1].startswith(
            f"file         a.toml, sets {count}"
        )

    def test_each_line_can_be_uncommented_alone(self, folder):
        for setting in settings_of(Config):
            text, count = re.subn(
                rf"^#(?={setting.key} = )", "", commented_file(), flags=re.MULTILINE
            )
            assert count == 1, setting.name
            (folder / "a.toml").write_text(text, encoding="utf-8")
            assert load("a.toml", {}) == Config()

    def test_every_setting_is_told_with_its_meaning_and_what_is_allowed(self):
        text = " ".join(re.sub(r"^# ?", "", commented_file(), flags=re.MULTILINE).split())
        for setting in settings_of(Config):
            assert setting.spec.meaning in text
            assert setting.spec.kind.allowed[1:] in text
        assert max(map(len, commented_file().splitlines())) <= 80
        assert commented_file().isascii()


class TestHelp:
    @pytest.mark.parametrize("words", ["--help", "show --help", "init --help"])
    @pytest.mark.parametrize("columns", ["64", "80"])
    def test_it_fits_the_terminal(self, capsys, monkeypatch, words, columns):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = run(capsys, words)
        assert code == 0
        lines = [line for line in out.splitlines() if not EXAMPLE.search(line)]
        assert max(map(len, lines)) <= int(columns)
        assert "--json" in out

    def test_it_says_where_values_come_from_and_its_examples_run(self, capsys, folder):
        out = run(capsys, "--help")[1]
        plain = " ".join(out.split())
        assert "an argument in the program, the environment variable KVSTORE_CFG_" in plain
        assert "A file is read only where it is named" in plain
        examples = EXAMPLE.findall(out)
        assert len(examples) == 4
        for example in examples:
            command = example.replace("kvstore config", f"{sys.executable} -m kvstore config")
            command = command.replace("8GiB", "8MiB")  # which any machine has
            done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b""), example

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("", "ACTION is missing (see kvstore config --help)"),
            ("shwo", "ACTION is 'shwo': there is show, init (see kvstore config --help)"),
            ("show --config", "--config: expected one argument (see kvstore config show --help)"),
            ("show a.toml", "unrecognized arguments: a.toml (see kvstore config --help)"),
        ],
    )
    def test_wrong_words_are_one_line(self, capsys, words, message):
        assert run(capsys, words) == (2, "", f"kvstore: {message}\n")


class TestTerminals:
    """In a process of its own, as a user has it."""

    def kvstore(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore", "config", *words]
        return subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )

    def test_a_name_that_the_terminal_cannot_print_is_escaped(self, folder):
        Path("é\udcff.toml").write_text("[store]\npolicy = 'lru'\n", encoding="utf-8")
        done = self.kvstore("show", "--config", "é\udcff.toml", PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert '"\\xe9\\udcff.toml", sets 1\n' in done.stdout

    def test_a_value_that_no_terminal_should_print_is_escaped(self):
        done = self.kvstore("show", KVSTORE_CFG_STORE__POLICY="\x1b[31m\nlru")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            'kvstore: KVSTORE_CFG_STORE__POLICY is "\\x1b[31m\\nlru": give one of '
        )
        assert done.stderr.count("\n") == 1

    @pytest.mark.parametrize("words", [["show"], ["init"], ["--help"]])
    def test_there_is_no_colour(self, words):
        assert "\033" not in self.kvstore(*words, NO_COLOR="1", FORCE_COLOR="1").stdout


def test_what_is_shown_is_what_an_open_store_has(capsys, folder):
    """The capacity by its bytes, the others by the settings that the core is given."""
    (folder / "a.toml").write_text(
        '[dram]\ncapacity_bytes = "2MiB"\n[store]\nwatermark_high = 0.95\n', encoding="utf-8"
    )
    document = json.loads(run(capsys, "show --config a.toml --json")[1])
    config = load("a.toml")
    shown = {name: row["value"] for name, row in document["settings"].items()}
    assert shown.pop("dram.capacity_bytes") == config.dram_capacity_bytes() == 2 * MIB
    settings = config.core_settings()
    core = {name: value for name, value in shown.items() if name.startswith("store.")}
    assert {name.partition(".")[2]: value for name, value in core.items()} == settings._asdict()
    assert shown["daemon.socket"] == config.daemon_socket().value
    assert config.store == StoreConfig(watermark_high=0.95)

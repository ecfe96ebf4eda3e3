"""Keys are frozen: 81 vectors, checked against our code and against a second way to compute them.

The second way is written from the format's sentences (docs/keys.md) and calls nothing of kvstore.
Vectors are only ever added, at the end: those that are there stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore.keys
import kvstore.storage_keys
from kvstore.errors import InvalidLayout
from kvstore.keys import FORMAT_VERSION, Media, Namespace, Source
from kvstore.layout import (
    KVLayer,
    LatentLayer,
    LayerSpec,
    Layout,
    OpaqueLayer,
    Part,
    Scales,
    StateLayer,
)
from kvstore.storage_keys import KeyMaker, storage_key

GOLDEN = Path(__file__).with_name("golden_keys.json")
#: SHA-256 of the golden file as it was with so many vectors. A line is added with vectors, and none
#: changes.
GOLDEN_SHA256 = {
    50: "ef78db22797aa28520011305de8dfcc2f0e2840596a641f35eae7dda4d9176cc",
    81: "3c64ad49db04c57529610fc2aee1fbf2fc9a219597e2fa33c1f0d7ba201ea3ff",
}
#: Their parts are no parts of their layouts: a link has the name of one that need not be there.
ONLY_NAMES = {"cache group and companion", "link of a hybrid's parts", "link of latents and heads"}

Vector = dict[str, Any]
VECTORS: list[Vector] = json.loads(GOLDEN.read_text(encoding="utf-8"))["vectors"]


def plain(value: Any) -> Any:
    """What JSON cannot say: {"hex": h} is bytes, {"repeat": [v, n]} is v n times."""
    if isinstance(value, dict) and value.keys() == {"hex"}:
        return bytes.fromhex(value["hex"])
    if isinstance(value, dict) and value.keys() == {"repeat"}:
        repeated, count = value["repeat"]
        return plain(repeated) * count
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


# The second way: straight-line code, from the format's sentences.


def enc(*fields: bytes | None) -> bytes:
    return b"".join(
        struct.pack("<I", 0xFFFFFFFF) if field is None else struct.pack("<I", len(field)) + field
        for field in fields
    )


def u32(value: int | None) -> bytes | None:
    return None if value is None else struct.pack("<I", value)


def text(value: str | bytes | None) -> bytes | None:
    return value.encode("utf-8") if isinstance(value, str) else value


LAYER_FIELDS = {"dtype", "head_dim", "latent_dim", "rope_dim"}


def layer_bytes(layer: dict[str, Any]) -> bytes:
    kind = layer["kind"]
    value_dim = layer.get("value_head_dim")
    opaque = [layer.get("bytes_per_token"), layer.get("bytes_per_block", 0)]
    return enc(
        text(kind),
        text(layer.get("dtype", "float32" if kind == "state" else None)),
        u32(layer.get("kv_heads")),
        u32(layer.get("head_dim")),
        None if value_dim == layer.get("head_dim") else u32(value_dim),
        u32(layer.get("latent_dim")),
        u32(layer.get("rope_dim")),
        text(layer.get("attention")),
        u32(layer.get("window_tokens")),
        u32(layer.get("state_bytes")),
        enc(*map(text, layer["scales"])) if "scales" in layer else None,
        enc(*map(u32, opaque)) if kind == "opaque" else None,
    )


def layout_bytes(kind: str, shape: dict[str, Any]) -> bytes:
    if kind == "of":
        layers = shape["layers"]
    else:
        layer = {name: value for name, value in shape.items() if name in LAYER_FIELDS}
        layer["kind"] = "latent" if kind == "mla" else "kv"
        if kind != "mla":
            layer["kv_heads"] = shape.get("kv_heads", shape.get("heads", 1))
        layers = [layer] * shape["layers"]
    kinds = {layer["kind"] for layer in layers}
    order = "layer token dim" if "latent" in kinds else "layer"
    if "kv" in kinds:
        order = "layer kv head token dim"
    companions = sorted(
        (name.encode("utf-8"), layout_bytes(*layout))
        for name, layout in shape.get("companions", {}).items()
    )
    return enc(
        text(shape.get("axis_order", order)),
        text(shape.get("quantisation")),
        text(shape.get("backend")),
        text(shape.get("isa")),
        enc(*(enc(*pair) for pair in companions)) if companions else None,
        enc(*map(layer_bytes, layers)),
    )


def second_way(vector: Vector, version: int = 1) -> dict[str, str]:
    """Namespace digest, chain hash of the last block, and its key, in hex."""
    given = plain(vector)
    ns, size = given["namespace"], given["namespace"]["block_tokens"]
    adapter = ns.get("adapter")
    if isinstance(adapter, str):
        adapter = bytes.fromhex(adapter.split(":")[1])
    namespace_digest = hashlib.sha256(
        enc(
            u32(version),
            text(ns["model"]),
            text(ns["fingerprint"]),
            layout_bytes(*given["layout"]),
            u32(size),
            adapter,
            text(ns.get("salt")),
            u32(ns.get("rank")),
            u32(ns.get("rank_count")),
            ns.get("epoch"),
        )
    ).digest()
    if "engine_hash" in given:
        source, chain_hash = enc(text(given["source"][0]), given["source"][1]), given["engine_hash"]
    else:
        source, chain_hash = enc(b"kvstore-sha256", None), bytes(32)
        media = sorted((start, end, digest) for digest, start, end in given.get("media", []))
        tokens = given["tokens"]
        for first in range(0, len(tokens), size):
            block = tokens[first : first + size]
            touching = [
                enc(u32(start), u32(end), digest)
                for start, end, digest in media
                if start < first + size and end > first
            ]
            fields = [
                chain_hash,
                b"".join(struct.pack("<I", token) for token in block),
                enc(*touching) if touching else None,
            ]
            if len(block) < size:
                fields.append(u32(len(block)))
            chain_hash = hashlib.sha256(enc(*fields)).digest()
    part = {"group": 0, "companion": None, "head_group": 0, "head_groups": 1} | given["part"]
    part_bytes = enc(
        u32(part["group"]),
        text(part["companion"]),
        u32(part["first_layer"]),
        u32(part["end_layer"]),
        u32(part["head_group"]),
        u32(part["head_groups"]),
    )
    key = hashlib.sha256(enc(u32(version), namespace_digest, source, chain_hash, part_bytes))
    return {
        "namespace_digest": namespace_digest.hex(),
        "chain_hash": chain_hash.hex(),
        "key": key.hexdigest(),
    }


KINDS = {"kv": KVLayer, "latent": LatentLayer, "state": StateLayer, "opaque": OpaqueLayer}


def our_layer(kind: str, scales: list[str] | None = None, **fields: Any) -> LayerSpec:
    if scales is not None:
        fields["scales"] = Scales(dtype=scales[0], granularity=scales[1])
    layer: LayerSpec = KINDS[kind](**fields)
    return layer


def our_layout(kind: str, shape: dict[str, Any]) -> Layout:
    options = dict(shape)
    if "companions" in shape:
        companions = shape["companions"].items()
        options["companions"] = {name: our_layout(*layout) for name, layout in companions}
    if kind == "of":
        return Layout.of([our_layer(**layer) for layer in options.pop("layers")], **options)
    layout: Layout = getattr(Layout, kind)(**options)
    return layout


def our_way(vector: Vector) -> dict[str, str]:
    given = plain(vector)
    namespace = Namespace(layout=our_layout(*given["layout"]), **given["namespace"])
    if "engine_hash" in given:
        (block_key,) = namespace.keys_of_hashes([given["engine_hash"]], Source(*given["source"]))
    else:
        media = [Media(*item) for item in given.get("media", [])]
        block_key = namespace.keys(given["tokens"], extra=media, partial=True)[-1]
    return {
        "namespace_digest": namespace.digest.hex(),
        "chain_hash": block_key.chain_hash.hex(),
        "key": storage_key(block_key, Part(**given["part"])).hex(),
    }


def named(vectors: list[Vector]) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in vectors]


@pytest.mark.parametrize("vector", named(VECTORS))
def test_our_key_is_the_golden_one(vector: Vector):
    """ID11: a change here makes every block that is stored anywhere a miss."""
    assert our_way(vector) == vector["expected"]


@pytest.mark.parametrize("vector", named(VECTORS))
def test_golden_key_follows_from_the_format(vector: Vector):
    """ID07: as a client in another language would compute it."""
    assert second_way(vector) == vector["expected"]


def golden_file_of(vectors: int) -> bytes:
    """The file as it was when it had so many: all bytes before the next one, and its end."""
    written = GOLDEN.read_bytes()
    starts = [found.start() for found in re.finditer(rb"(?m)^  \{$", written)]
    if vectors == len(starts):
        return written
    return written[: starts[vectors] - len(b",\n")] + b"\n ]\n}\n"


@pytest.mark.parametrize("count", GOLDEN_SHA256)
def test_golden_vectors_are_the_ones_of_this_version(count: int):
    """ID11: code and vectors cannot change together unnoticed."""
    assert hashlib.sha256(golden_file_of(count)).hexdigest() == GOLDEN_SHA256[count]


def test_golden_vectors_are_all_pinned_and_all_different():
    """ID11."""
    assert FORMAT_VERSION == json.loads(GOLDEN.read_text(encoding="utf-8"))["format_version"] == 1
    assert len(VECTORS) == max(GOLDEN_SHA256)
    assert len({vector["expected"]["key"] for vector in VECTORS}) == len(VECTORS)
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)


def test_another_format_version_misses(monkeypatch: pytest.MonkeyPatch):
    """ID11: every namespace and every key is another one; nothing fails."""
    for module in (kvstore.keys, kvstore.storage_keys):
        monkeypatch.setattr(module, "FORMAT_VERSION", 2)
    for vector in VECTORS:
        assert our_way(vector) == second_way(vector, version=2)
        assert our_way(vector)["key"] != vector["expected"]["key"]


def test_parts_of_the_vectors_are_parts_of_their_layouts():
    assert {vector["name"] for vector in VECTORS} >= ONLY_NAMES
    for vector in VECTORS:
        given = plain(vector)
        namespace = Namespace(layout=our_layout(*given["layout"]), **given["namespace"])
        if vector["name"] in ONLY_NAMES:
            with pytest.raises(InvalidLayout):
                KeyMaker(namespace, Part(**given["part"]))
        else:
            KeyMaker(namespace, Part(**given["part"]))


def test_worked_vector_of_the_docs_is_a_golden_one():
    docs = Path(__file__).parents[2] / "docs" / "keys.md"
    (vector,) = (vector for vector in VECTORS if vector["name"] == "MQA")
    written = docs.read_text(encoding="utf-8")
    assert all(f"= {value}\n" in written for value in vector["expected"].values())


PRINT_KEYS = """
from kvstore.keys import Media, Namespace
from kvstore.layout import Layout
from kvstore.storage_keys import KeyMaker
layout = Layout.gqa(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
namespace = Namespace(model="m", fingerprint="f", layout=layout, block_tokens=16, salt="s")
media = [Media(bytes([n]) * 32, 20, 90) for n in range(9)]
keys = namespace.keys(range(128), extra=media)
print([key.hex() for key in KeyMaker(namespace, layout.parts[0]).keys(keys, is_prefix=True)])
"""


def test_keys_depend_on_no_process_and_no_hash_seed(tmp_path: Path):
    """ID01: what one process puts, another finds."""
    found = set()
    for seed in ("0", "1", "4294967295", "random", None):
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"PYTHONHASHSEED": seed} if seed is not None else {}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            capture_output=True,
            check=True,
            cwd=tmp_path,
            env=environment,
            text=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert found.pop().count(",") == 7

"""Who shares, and who must not: the namespace of a model, and adapters by their content."""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from kvstore.connectors.transformers import PrefixCache, adapter_digest  # noqa: E402
from kvstore.errors import UnsupportedCache  # noqa: E402
from kvstore.types import Outcome  # noqa: E402
from tests.e2e.reference import GREEDY, check_same, plain  # noqa: E402


class TestIdentity:
    def test_equal_weights_share_and_other_weights_miss(self, llama, store, prompt):
        PrefixCache(llama, store).generate(prompt(40), **GREEDY)

        same = PrefixCache(copy.deepcopy(llama), store)
        same.generate(prompt(40), **GREEDY)
        assert same.last.loaded_tokens == 32

        edited = copy.deepcopy(llama)
        with torch.no_grad():
            edited.model.layers[1].self_attn.v_proj.weight[0, 0] += 0.5
        other = PrefixCache(edited, store)
        assert other.namespace.model == same.namespace.model
        assert torch.equal(other.generate(prompt(40), **GREEDY), plain(edited, prompt(40)))
        assert (other.last.loaded_tokens, other.last.reason) == (0, Outcome.ABSENT)

    def test_whatever_changes_the_bytes_changes_the_namespace(self, llama, store):
        buffers = copy.deepcopy(llama)
        buffers.model.rotary_emb.inv_freq *= 2
        scaled = copy.deepcopy(llama)
        scaled.config.rms_norm_eps = 1e-5
        caches = [
            PrefixCache(llama, store),
            PrefixCache(buffers, store),
            PrefixCache(scaled, store),
            PrefixCache(copy.deepcopy(llama).to(torch.bfloat16), store),
            PrefixCache(copy.deepcopy(llama).to(torch.float16), store),
            PrefixCache(llama, store, block_tokens=32),
            PrefixCache(llama, store, salt="tenant"),
            PrefixCache(llama, store, adapter=bytes(32)),
            PrefixCache(llama, store, adapter=bytes([1] * 32)),
            PrefixCache(llama, store, fingerprint="revision 1"),
        ]
        assert len({cache.namespace.digest for cache in caches}) == len(caches)

    def test_where_and_with_what_it_was_saved_does_not(self, llama, store):
        moved = copy.deepcopy(llama)
        moved.config.transformers_version = "5.0.0"
        moved.config.dtype = "float32"
        moved.config.architectures = ["LlamaForCausalLM"]
        before, after = PrefixCache(llama, store), PrefixCache(moved, store)
        assert before.namespace == after.namespace


class LowRank(nn.Module):
    """A hand-made LoRA: a linear layer of the model, and the adapter's two beside it."""

    def __init__(self, linear, down, up, scaling):
        super().__init__()
        self.linear, self.scaling = linear, scaling
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T * self.scaling


CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}


def an_adapter(seed):
    """The state dict of an adapter for the values of every layer."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"layers.{layer}.v_proj.{name}": torch.randn(shape, generator=random) / 4
        for layer in range(3)
        for name, shape in (("down", (4, 64)), ("up", (32, 4)))
    }


def adapted(model, weights, config):
    model = copy.deepcopy(model)
    for index, layer in enumerate(model.model.layers):
        down, up = (weights[f"layers.{index}.v_proj.{name}"] for name in ("down", "up"))
        scaling = config["lora_alpha"] / config["r"]
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj, down, up, scaling)
    return model


class TestAdapters:
    @pytest.mark.parametrize("fingerprint", [None, "revision 1"], ids=["hashed", "given"])
    def test_two_adapters_and_none_do_not_meet(self, llama, store, prompt, fingerprint):
        """The same name, other weights: each finds its own blocks and no other's."""
        caches = [(llama, PrefixCache(llama, store, fingerprint=fingerprint))]
        for seed in (1, 2):
            weights = an_adapter(seed)
            model = adapted(llama, weights, CONFIG)
            digest = adapter_digest(weights, CONFIG)
            caches.append(
                (model, PrefixCache(model, store, fingerprint=fingerprint, adapter=digest))
            )
        answers = set()
        for loaded in (0, 32):
            for model, cache in caches:
                sequences = check_same(model, cache, prompt(40))
                assert cache.last.loaded_tokens == loaded
                answers.add(tuple(sequences[0].tolist()))
        assert len(answers) == 3

    def test_equal_content_is_the_same_adapter(self, llama, store, prompt):
        first = adapted(llama, an_adapter(1), CONFIG)
        again = adapted(llama, an_adapter(1), CONFIG)
        for loaded, model in ((0, first), (32, again)):
            digest = adapter_digest(an_adapter(1), CONFIG)
            cache = PrefixCache(model, store, fingerprint="revision 1", adapter=digest)
            check_same(model, cache, prompt(40))
            assert cache.last.loaded_tokens == loaded


class TestAdapterDigest:
    def test_it_is_of_the_content_wherever_that_lies(self, tmp_path):
        weights = an_adapter(1)
        expected = adapter_digest(weights, CONFIG)
        assert expected.startswith("sha256:")
        assert adapter_digest(dict(reversed(weights.items())), CONFIG) == expected
        save_file(weights, tmp_path / "other name.safetensors")
        assert adapter_digest(tmp_path / "other name.safetensors", CONFIG) == expected
        save_file(weights, tmp_path / "adapter_model.safetensors")
        saved = {**CONFIG, "base_model_name_or_path": str(tmp_path), "inference_mode": True}
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
        assert adapter_digest(tmp_path) == adapter_digest(str(tmp_path)) == expected

    def test_whatever_changes_what_it_computes_changes_it(self):
        weights = an_adapter(1)
        name = "layers.0.v_proj.up"
        edited = {**weights, name: weights[name].clone()}
        edited[name][0, 0] += 1
        digests = [
            adapter_digest(weights, CONFIG),
            adapter_digest(edited, CONFIG),
            adapter_digest({**weights, name: weights[name].half()}, CONFIG),
            adapter_digest({**weights, name: weights[name].T.contiguous()}, CONFIG),
            adapter_digest({key: weights[key] for key in weights if key != name}, CONFIG),
            adapter_digest({**weights, "layers.9.v_proj.up": weights[name]}, CONFIG),
            adapter_digest(weights, {**CONFIG, "lora_alpha": 16}),
            adapter_digest(weights, {**CONFIG, "use_rslora": True}),
            adapter_digest(weights, {}),
        ]
        assert len(set(digests)) == len(digests)

    def test_the_order_of_names_in_a_config_does_not_count(self):
        """PEFT has a set there, and saves it in whatever order that has."""
        weights = an_adapter(1)
        for modules in (["a", "b"], ["b", "a"], {"a", "b"}, ("b", "a")):
            assert adapter_digest(weights, {"target_modules": modules}) == adapter_digest(
                weights, {"target_modules": ["a", "b"]}
            )

    def test_a_config_is_not_left_out_by_oversight(self, tmp_path):
        with pytest.raises(TypeError, match="config: expected the adapter's config"):
            adapter_digest(an_adapter(1))
        save_file(an_adapter(1), tmp_path / "a.safetensors")
        with pytest.raises(TypeError, match="config: expected the adapter's config"):
            adapter_digest(tmp_path / "a.safetensors")

    def test_a_pickle_is_refused(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.bin").write_bytes(b"")
        with pytest.raises(UnsupportedCache, match=r"adapter_model.bin is a pickle"):
            adapter_digest(tmp_path)


class TestPeft:
    """The library itself, where it is installed."""

    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft")

    @pytest.fixture
    def model(self, peft, llama):
        config = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "init_lora_weights": False}
        torch.manual_seed(0)
        model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(**config), "first")
        model.add_adapter("second", peft.LoraConfig(**config))
        return model.eval()

    def digest(self, peft, model, name):
        weights = peft.get_peft_model_state_dict(model, adapter_name=name)
        return adapter_digest(weights, model.peft_config[name].to_dict())

    def test_its_folder_has_the_digest_of_its_state_dict(self, peft, model, tmp_path):
        model.save_pretrained(tmp_path)
        for name in ("first", "second"):
            assert adapter_digest(tmp_path / name) == self.digest(peft, model, name)

    def test_each_adapter_has_a_cache_of_its_own(self, peft, model, store, prompt):
        caches = {}
        for loaded in (0, 32):
            for name in ("first", "second"):
                model.set_adapter(name)
                if name not in caches:
                    digest = self.digest(peft, model, name)
                    caches[name] = PrefixCache(model, store, adapter=digest)
                check_same(model, caches[name], prompt(40))
                assert caches[name].last.loaded_tokens == loaded
        with pytest.raises(UnsupportedCache, match="one for each adapter"):
            caches["first"].generate(prompt(40), **GREEDY)
        model.set_adapter("first")
        with model.disable_adapter(), pytest.raises(UnsupportedCache, match="switched"):
            caches["first"].generate(prompt(40), **GREEDY)

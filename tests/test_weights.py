"""Saving and loading weights: equal to the bit, wide time scales, shards, and one sentence for every broken folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import generator, ordinary, tiny_config, tiny_model

from mezzotint.models.errors import InputError
from mezzotint.models.weights import INDEX, WEIGHTS, WIDE, load_config, load_model, save_weights


@pytest.fixture
def model():
    return tiny_model(tiny_config("AM", 4, tie_embeddings=True))


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_models_are_equal_to_the_bit(tmp_path, tied):
    model = tiny_model(tiny_config("AMM", 4, tie_embeddings=tied))
    save_weights(model, tmp_path / "release")
    loaded = load_model(tmp_path / "release")
    assert loaded.config == model.config and not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]) and tensor.dtype == loaded.state_dict()[name].dtype
    canvas = ordinary(model.config, (2, 4), generator())
    assert torch.equal(model.denoise(canvas, model.start(2, 8)), loaded.denoise(canvas, loaded.start(2, 8)))
    stored = load_file(tmp_path / "release" / WEIGHTS)
    assert ("head.weight" in stored) is not tied
    assert sorted(path.name for path in (tmp_path / "release").iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_time_scales_stay_wide_on_disk_and_when_loaded(tmp_path, model, dtype):
    save_weights(model, tmp_path, dtype=dtype)
    stored = load_file(tmp_path / WEIGHTS)
    for loaded in (stored, dict(load_model(tmp_path).named_parameters())):
        wide = {name for name in loaded if name.split(".")[-1] in WIDE}
        assert len(wide) == 3
        assert all(loaded[name].dtype == (torch.float32 if name in wide else dtype) for name in loaded)
    again = dict(load_model(tmp_path, dtype=torch.bfloat16).named_parameters())
    assert again["layers.1.mixer.A_log"].dtype == torch.float32
    assert again["embed.weight"].dtype == torch.bfloat16


def test_shards_have_an_index_and_replace_an_earlier_save(tmp_path, model):
    save_weights(model, tmp_path)
    save_weights(model, tmp_path, shard_bytes=4000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2 and WEIGHTS not in names and f"-of-{len(names):05d}" in names[0]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    with safe_open(str(tmp_path / names[0]), framework="pt") as file:
        assert {key for key, name in index["weight_map"].items() if name == names[0]} == set(file.keys())
    loaded = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    save_weights(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]


def edit_config(folder, inner: bool = False, **changes):
    """Set keys of config.json, or of its `denoiser`; `...` removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    place = values["denoiser"] if inner else values
    place.update(changes)
    for key in [key for key, value in place.items() if value is ...]:
        del place[key]
    path.write_text(json.dumps(values))


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def narrow(tensors):
    tensors["norm.weight"] = tensors["norm.weight"][:5].clone()


BROKEN = [
    (lambda f: (f / WEIGHTS).unlink(), "has no weights"),
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:500]), "cannot be read as safetensors"),
    (lambda f: edit_config(f, format=2), "format 2, this version reads up to 1"),
    (lambda f: edit_config(f, format=...), "no format version"),
    (lambda f: edit_config(f, model_type="llama"), "'llama' model"),
    (lambda f: edit_config(f, formta=3), "unknown key 'formta'; the nearest is 'format'"),
    (lambda f: edit_config(f, denoiser=...), "lacks the sizes of the model"),
    (lambda f: edit_config(f, inner=True, d_modle=3), "key 'd_modle'; the nearest is 'd_model'"),
    (lambda f: edit_config(f, inner=True, d_ff=...), "lacks the key 'd_ff'"),
    (lambda f: edit_config(f, inner=True, d_ff=24), "has shape"),
    (lambda f: edit_config(f, inner=True, n_kv_heads=3), "config.json: model configuration: n_heads 4"),
    (lambda f: edit_weights(f, narrow), r"norm.weight has shape \(5,\), but config.json means \(12,\)"),
    (lambda f: edit_weights(f, lambda t: t.pop("norm.weight")), "lack norm.weight"),
    (lambda f: edit_weights(f, lambda t: t.update(extra=torch.ones(1))), "holds 'extra'"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_broken_folders_are_refused_in_one_sentence(tmp_path, model, damage, words):
    save_weights(model, tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=words) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path, model):
    save_weights(model, tmp_path, shard_bytes=4000)
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(InputError, match=victim.name):
        load_model(tmp_path)


def test_config_round_trips(tmp_path, model):
    save_weights(model, tmp_path, about={"architectures": ["X"], "auto_map": {}})
    assert load_config(tmp_path) == model.config
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["format"], values["model_type"], values["dtype"]) == (1, "mezzotint", "float64")

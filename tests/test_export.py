"""Releases: loaded by transformers here and in clean environments, equal logits, equal ids, nothing half-written."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import generator, tiny_config, tiny_model

from mezzotint.data.errors import InputError as DataInputError
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.launch import export
from mezzotint.launch.bundle import bundle_files
from mezzotint.launch.export import write_release
from mezzotint.launch.model_card import Facts
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler, TopK
from mezzotint.models.weights import load_model

HERE = Path(__file__).resolve().parent
FACTS = Facts(trained={"optimizer steps": 3}, dtype="float32")
STRANGE = [
    "",
    "<mask>",
    "<eos> x <pad><unk>",
    "<0x41>",
    "▁",
    " ▁▁ ",
    "a▁b",
    "\x00",
    "\r\n\t \n",
    "e\u0301é",
    "漢字 \U0001f600",
    "aaaaaaa",
    "=" * 77,
]


def source_text() -> list[str]:
    """Real prose and code: this test folder and some of the standard library."""
    library = Path(json.__file__).resolve().parents[1]
    return [path.read_text(encoding="utf-8") for path in (*sorted(HERE.glob("*.py")), *sorted(library.glob("a*.py")))]


def train_sentencepiece(path: Path, texts: list[str], **options) -> None:
    """A tokenizer.model with the options of mezzotint-data."""
    import sentencepiece

    lines = [line for text in texts for line in text.split("\n") if line]
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            pad_id=0,
            pad_piece="<pad>",
            eos_id=1,
            eos_piece="<eos>",
            unk_id=2,
            bos_id=-1,
            control_symbols=["<mask>"],
            minloglevel=2,
            **options,
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(folder / "tokenizer.model", source_text(), model_type="bpe", vocab_size=1200)
    return load_tokenizer(folder)


def model_for(tokenizer, pattern: str = "AM", **overrides):
    return tiny_model(
        tiny_config(
            pattern,
            4,
            vocab_size=tokenizer.vocab_size,
            mask_token_id=tokenizer.mask_id,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            **overrides,
        )
    ).float()


@pytest.fixture(scope="module")
def release(tokenizer, tmp_path_factory):
    """(model, folder) of an exported hybrid."""
    model = model_for(tokenizer, tie_embeddings=True)
    folder = tmp_path_factory.mktemp("releases") / "tiny-hybrid.v1"
    assert write_release(folder, model, tokenizer, recipe="seed: 1\n", facts=FACTS) == 0.0
    return model, folder


def test_a_release_holds_what_it_should(release, tokenizer):
    _, folder = release
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "training.yaml", "README.md"} <= names
    assert {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "hf.py", "ops_ssd.py"} <= names
    assert not [name for name in names if ".tmp" in name]
    assert list(folder.parent.iterdir()) == [folder]
    assert load_tokenizer(folder).sha256 == tokenizer.sha256
    assert "| optimizer steps | 3 |" in (folder / "README.md").read_text()


@pytest.fixture(scope="module")
def loaded(release, tmp_path_factory):
    """(transformers model, transformers tokenizer) loaded from the release with nothing of mezzotint's package."""
    pytest.importorskip("transformers", reason="the export to transformers needs transformers: pip install -e .[dev]")
    import transformers.dynamic_module_utils as dynamic
    from transformers import AutoModel, AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic, "HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        model = AutoModel.from_pretrained(release[1], trust_remote_code=True).eval()
        return model, AutoTokenizer.from_pretrained(release[1], trust_remote_code=True)


def test_transformers_gives_the_same_logits(release, loaded):
    model, tokens = release[0], torch.randint(4, 1200, (2, 11), generator=generator())
    padded = torch.nn.functional.pad(tokens, (0, 1), value=model.config.mask_token_id)
    with torch.no_grad():
        got = loaded[0](tokens).logits
        want = model(padded[:, :8], padded.unflatten(1, (3, 4)), torch.arange(3).expand(2, -1))
    assert type(loaded[0]).__module__.startswith("transformers_modules")
    torch.testing.assert_close(got, want.flatten(1, 2)[:, :11], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="only in the last block"):
        loaded[0](torch.full((1, 8), model.config.mask_token_id))


def test_transformers_generates_the_same_text(release, loaded, tokenizer):
    model, (hf, hf_tokenizer) = release[0], loaded
    prompts = ["def f(x):\n    return", "import os, <mask>", ""]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    want = generate(
        model, ids, max_new_tokens=9, reveal=TopK(steps=2), sampler=Sampler(temperature=0.0), generator=generator()
    )
    texts = hf.generate_text(hf_tokenizer, prompts, max_new_tokens=9, reveal="topk=2", temperature=0.0)
    assert texts == [hf_tokenizer.decode(text) for text in want.tokens]  # bytes that are no UTF-8: U+FFFD its own way
    batch = hf_tokenizer(prompts, padding=True, return_tensors="pt")
    rows = hf.generate(batch["input_ids"], batch["attention_mask"], max_new_tokens=9, reveal="topk=2", temperature=0.0)
    width = batch["input_ids"].shape[1]
    for row, text, ended in zip(rows.tolist(), want.tokens, want.ended):
        new = text + [tokenizer.eos_id] * ended
        assert row[width:] == new + [tokenizer.pad_id] * (len(row) - width - len(new))
    several = hf.generate(batch["input_ids"][:1], max_new_tokens=5, num_return_sequences=3, seed=4)
    assert several.shape[0] == 3 and len({tuple(row) for row in several.tolist()}) > 1


def test_stored_generation_defaults_are_used(loaded):
    assert loaded[0].generation_config.to_dict()["reveal"] == "topk=1"
    assert loaded[0].generation_config.max_new_tokens == 128
    assert len(loaded[0]._generation([[5]], seed=0, samples=1, given={}).tokens[0]) <= 128


def test_time_scales_stay_float32_in_a_bfloat16_release(tokenizer, tmp_path):
    model = model_for(tokenizer, "M")
    facts = Facts(trained={}, dtype="bfloat16")
    assert 0 < write_release(tmp_path / "half", model, tokenizer, recipe="", facts=facts) < 0.5
    loaded = load_model(tmp_path / "half")
    assert loaded.embed.weight.dtype == torch.bfloat16
    assert loaded.layers[0].mixer.A_log.dtype == torch.float32


def test_autotokenizer_gives_the_ids_of_training(loaded, tokenizer):
    fast = loaded[1]
    assert (fast.mask_token_id, fast.eos_token_id, fast.pad_token_id) == (
        tokenizer.mask_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    rng, pieces = random.Random(0), [*STRANGE, " ", "self", "  ", "\n    ", "é", "--", "aa", "a"]
    mixed = ["".join(rng.choices(pieces, k=12)) for _ in range(500)]
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    scattered = ["".join(map(chr, rng.choices(points, k=40))) for _ in range(200)]
    runs = ["".join(rng.choices(" a\n-", k=60)) for _ in range(500)]
    for text in (*STRANGE, *mixed, *scattered, *runs, *source_text()):
        ids = tokenizer.encode(text)
        assert fast(text)["input_ids"] == ids == fast.encode(text)
        assert fast.decode(ids) == text


def test_a_foreign_tokenizer_json_keeps_its_ids_and_gains_three(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>"]  # its own <pad> is not ours
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        source_text()[:3], trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    write_release(tmp_path / "release", model_for(tokenizer), tokenizer, recipe="", facts=FACTS)
    again = load_tokenizer(tmp_path / "release")
    assert (again.sha256, again.vocab_size) == (tokenizer.sha256, tokenizer.vocab_size)
    transformers = pytest.importorskip("transformers")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "release")
    assert (fast.mask_token_id, fast.eos_token_id, fast.pad_token_id) == (600, 601, 602)
    for text in (*STRANGE, "<s>", source_text()[1]):
        assert fast(text)["input_ids"] == tokenizer.encode(text)
        assert fast.decode(tokenizer.encode(text)) == text


def test_a_unigram_tokenizer_is_released_as_it_is_and_the_card_says_why(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model", source_text()[:2], model_type="unigram", vocab_size=500)
    tokenizer = load_tokenizer(tmp_path)
    write_release(tmp_path / "release", model_for(tokenizer), tokenizer, recipe="", facts=FACTS)
    assert load_tokenizer(tmp_path / "release").sha256 == tokenizer.sha256
    assert not (tmp_path / "release" / "tokenizer.json").exists()
    assert "no `tokenizer.json` here: the sentencepiece model is no BPE" in (tmp_path / "release/README.md").read_text()


def test_nothing_is_left_of_a_failed_export(release, tokenizer, tmp_path, monkeypatch):
    model, _ = release
    monkeypatch.setattr(export, "_compare", lambda model, loaded: 1e-3)
    with pytest.raises(InputError, match="nothing was released"):
        write_release(tmp_path / "out", model, tokenizer, recipe="", facts=FACTS)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_release_is_replaced_only_on_request(tokenizer, tmp_path):
    model = model_for(tokenizer, "A")
    write_release(tmp_path / "out", model, tokenizer, recipe="one", facts=FACTS)
    with pytest.raises(InputError, match="exists"):
        write_release(tmp_path / "out", model, tokenizer, recipe="two", facts=FACTS)
    write_release(tmp_path / "out", model, tokenizer, recipe="two", facts=FACTS, overwrite=True)
    assert (tmp_path / "out" / "training.yaml").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_killed_exports_left_is_swept_and_other_folders_are_kept(tokenizer, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for left in (f"out.tmp-{gone.pid}", f"out.old-{gone.pid}", f"out.tmp-{os.getppid()}", "out.tmp-mine", "run"):
        (tmp_path / left).mkdir()
    model = model_for(tokenizer, "A")
    write_release(tmp_path / "out", model, tokenizer, recipe="", facts=FACTS)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run", f"out.tmp-{os.getppid()}", "out.tmp-mine"}
    with pytest.raises(InputError, match="run is no release folder, and --overwrite replaces nothing else"):
        write_release(tmp_path / "run", model, tokenizer, recipe="", facts=FACTS, overwrite=True)


def test_a_tokenizer_that_gives_other_ids_is_refused(tokenizer, tmp_path):
    class Other(type(tokenizer)):
        def encode(self, text: str) -> list[int]:
            return [*super().encode(text), 5]

    other = Other.__new__(Other)
    other.__dict__.update(tokenizer.__dict__)
    with pytest.raises(DataInputError, match="other ids"):
        write_release(tmp_path / "out", model_for(tokenizer), other, recipe="", facts=FACTS)


# -- the bundle --------------------------------------------------------------------------------------------------


def test_nested_modules_become_flat_and_every_file_is_named_by_the_entry(tmp_path):
    (tmp_path / "ops").mkdir()
    files = {
        "hf.py": "from .core import f\n",
        "core.py": "from .ops import fast, total\nfrom .ops.fast import (\n    g,\n    h as k,\n)\n"
        "def f():\n    from .late import x\n    return x\n",
        "late.py": "x = 1\n",
        "unused.py": "",
        "ops/__init__.py": "from . import fast as quick\ntotal = 1\n",
        "ops/fast.py": "from ..late import x\nfrom .slow import y\ng = h = 1\n",
        "ops/slow.py": "try:\n    import mamba_ssm\nexcept ImportError:\n    pass\ny = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flat = bundle_files(tmp_path)
    assert set(flat) == {"hf.py", "core.py", "late.py", "ops.py", "ops_fast.py", "ops_slow.py"}
    assert flat["core.py"].startswith(
        "from . import ops_fast as fast\nfrom .ops import total\nfrom .ops_fast import g, h as k\n"
        "def f():\n    from .late import x\n"
    )
    assert flat["ops.py"] == "from . import ops_fast as quick\ntotal = 1\n"
    assert flat["ops_fast.py"].startswith("from .late import x\nfrom .ops_slow import y\n")
    for name in ("late", "ops", "ops_fast", "ops_slow"):
        assert f"\nfrom .{name} import __name__ as" in flat["hf.py"]
    (tmp_path / "late.py").write_text("import numpy\n")
    with pytest.raises(InputError, match=r"late\.py imports numpy"):
        bundle_files(tmp_path)


def test_the_help_is_instant_and_says_what_it_does():
    code = (
        "import sys; from mezzotint.launch.export import main\n"
        "try: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RUN_FOLDER" in done.stdout


def test_a_missing_run_is_one_sentence_and_code_2(tmp_path, capsys):
    assert export.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "no run folder" in capsys.readouterr().err


def make_run(folder: Path, model, tokenizer) -> Path:
    """A run folder with one checkpoint, as training leaves it; its average is the model with another final norm."""
    from mezzotint.training.checkpoint import EMA, CheckpointConfig, RunState
    from mezzotint.training.distributed import Ranks
    from mezzotint.training.fragments import WEIGHTS
    from mezzotint.training.pieces import Piece
    from mezzotint.training.saver import Saver

    (folder / "data").mkdir(parents=True)
    shutil.copyfile(tokenizer.files[0], folder / "data" / "tokenizer.model")
    weights = {name: value.detach().float() for name, value in model.state_dict().items()}
    state = RunState(
        step=7,
        next_row=56,
        seed=1,
        world=1,
        zero_stage=1,
        ema_updates=7,
        validation_due=False,
        history={},
        data_hash="d" * 64,
        tokenizer_hash=tokenizer.sha256,
        arms_hash="a" * 64,
        recipe=f"data: {{row_length: 64, sources: [[{folder / 'data'}, 1.0]]}}\nema_decay: 0.9\n",
        model=model.config.to_dict(),
        shapes={name: list(value.shape) for name, value in weights.items()},
    )
    pieces = [
        Piece(kind, name, start, part)
        for kind, tensors in ((WEIGHTS, weights), (EMA, weights | {"norm.weight": weights["norm.weight"] * 2}))
        for name, value in tensors.items()
        for start, part in ((0, value.flatten()[:3]), (3, value.flatten()[3:]))  # as two ranks would have cut it
    ]
    saver = Saver(folder / "run", CheckpointConfig(), Ranks(0, 1, torch.device("cpu")))
    assert saver.begin(state, pieces) and saver.finish()
    bound = {"bits_per_byte": 3.5, "bits_per_byte_error": 0.25, "nats_per_token": 6.0, "nats_per_token_error": 0.5}
    records = [{"kind": "validation", "step": step, **bound} for step in (5, 7, 9)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "run"


def test_the_command_turns_a_run_into_a_release(tokenizer, tmp_path, capsys):
    model = model_for(tokenizer, "M")
    run = make_run(tmp_path, model, tokenizer)
    assert export.main([str(run), str(tmp_path / "averaged")]) == 0
    assert "reloaded; largest difference of a logit 0" in capsys.readouterr().out
    assert export.main([str(run), str(tmp_path / "last"), "--no-ema"]) == 0
    averaged, last = load_model(tmp_path / "averaged"), load_model(tmp_path / "last")
    assert torch.equal(last.norm.weight, model.norm.weight)
    assert torch.equal(averaged.norm.weight, model.norm.weight * 2)
    card = (tmp_path / "averaged" / "README.md").read_text()
    assert (
        "| held-out bound, bits/byte | 3.5000 ± 0.2500 (step 7) |" in card
        and "| averaged weights | yes (decay 0.9) |" in card
    )
    assert (tmp_path / "last" / "training.yaml").read_text().startswith("data:")
    capsys.readouterr()
    assert export.main([str(run), str(tmp_path / "last")]) == 2
    assert "exists" in capsys.readouterr().err
    (tmp_path / "data" / "tokenizer.model").unlink()
    assert export.main([str(run), str(tmp_path / "gone")]) == 2
    assert "tokenizer" in capsys.readouterr().err


# -- clean environments ------------------------------------------------------------------------------------------

CHECK = """
import importlib.util, json, sys, torch
from transformers import AutoConfig, AutoModel, AutoTokenizer
folder, want = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
assert importlib.util.find_spec("mezzotint") is None and importlib.util.find_spec("sentencepiece") is None
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model, info = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
texts = json.loads(want["texts"])
assert [tokenizer(text)["input_ids"] for text in texts] == json.loads(want["ids"])
assert [tokenizer.decode(ids) for ids in json.loads(want["ids"])] == texts
print("logits", (model(want["tokens"]).logits - want["logits"])[want["logits"].isfinite()].abs().max().item())
got = model.generate_text(tokenizer, ["def f(x):", ""], max_new_tokens=9, reveal="topk=2", temperature=0.0)
assert got == [tokenizer.decode(ids) for ids in json.loads(want["generated"])], got
half = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
kinds = {name.split(".")[-1]: p.dtype for name, p in half.named_parameters()}
assert kinds["A_log"] == kinds["dt_bias"] == kinds["D"] == torch.float32 and kinds["weight"] == torch.bfloat16, kinds
half.save_pretrained(sys.argv[3])
again = AutoModel.from_pretrained(sys.argv[3], trust_remote_code=True)
assert all(torch.equal(a.float(), b.float()) for a, b in zip(half.parameters(), again.parameters()))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transformers", ["transformers==4.57.*", "transformers>=5"])
def test_a_release_loads_where_only_torch_transformers_and_safetensors_are(release, tokenizer, tmp_path, transformers):
    model, folder = release
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    torch_version = torch.__version__.split("+")[0]
    for packages in ([f"torch=={torch_version}"], [transformers, "safetensors"]):
        done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    texts = [text for text in STRANGE if text] + source_text()[:2]
    tokens = torch.randint(4, tokenizer.vocab_size, (2, 12), generator=generator())
    with torch.no_grad():
        logits = model(tokens[:, :8], tokens.unflatten(1, (3, 4)), torch.arange(3).expand(2, -1)).flatten(1, 2)
    made = generate(
        model,
        [tokenizer.encode("def f(x):"), []],
        max_new_tokens=9,
        reveal=TopK(steps=2),
        sampler=Sampler(temperature=0.0),
        generator=generator(),
    )
    want = {
        "tokens": tokens,
        "logits": logits,
        "texts": json.dumps(texts),
        "ids": json.dumps([tokenizer.encode(text) for text in texts]),
        "generated": json.dumps(made.tokens),
    }
    torch.save(want, tmp_path / "want.pt")
    (tmp_path / "check.py").write_text(CHECK)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python, tmp_path / "check.py", folder, tmp_path / "want.pt", tmp_path / "saved"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    difference = float(done.stdout.split("logits ")[1].split()[0])
    assert difference < 1e-5

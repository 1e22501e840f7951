"""Other people's models beside ours: as many parameters, the same function where it is the same, and the table."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from mezzotint.eval import bench_peers
from mezzotint.eval.bench_peers import Bench, table
from mezzotint.eval.bench_rows import QUICK
from mezzotint.eval.bench_training import training_case, two_stream_step
from mezzotint.eval.peers import LlamaDecoder, dense_mask_step, llama, mamba2
from mezzotint.models.config import ModelConfig, parameter_count, preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError

SIZES = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "n_heads": 4, "head_dim": 8}
MAMBA = {"vocab_size": 64, "d_model": 32, "d_state": 8}
SMALL = ModelConfig.from_dict({"pattern": "AA", "block_length": 4, "chunk_length": 4, "n_kv_heads": 2} | SIZES)


def gradients(model: Denoiser, step) -> dict[str, torch.Tensor]:
    """Of one step, caught before it drops them."""
    found: dict[str, torch.Tensor] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
        for name, parameter in model.named_parameters()
    ]
    step()
    for handle in handles:
        handle.remove()
    return found


def test_the_dense_mask_computes_what_two_streams_compute():
    model = Denoiser(SMALL).double()
    case = training_case(SMALL, batch=2, row_length=16)
    ours = gradients(model, two_stream_step(model, case, autocast=torch.float64))
    dense = gradients(model, dense_mask_step(model, case, autocast=torch.float64))
    assert ours.keys() == dense.keys() == dict(model.named_parameters()).keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, dense[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("backbone", ["attention", "mamba"])
def test_peers_have_our_parameters(backbone: str):
    config = preset("10m", backbone)
    peer = llama(config, length=64) if backbone == "attention" else mamba2(config)
    assert abs(peer.parameters / parameter_count(config) - 1) <= 0.02


def test_a_peer_of_another_size_is_refused():
    with pytest.raises(InputError, match="take a larger preset"):
        mamba2(
            ModelConfig.from_dict(
                {"pattern": "M", "block_length": 4, "chunk_length": 4, "d_ff": 16, "ssm_head_dim": 8} | MAMBA
            )
        )


def test_llama_decodes_behind_its_cache_and_is_cut_back():
    decoder = LlamaDecoder(llama(SMALL, length=64), context=24, dtype=torch.float32)
    for _ in range(2):
        decoder(), decoder()
        assert decoder.cache.get_seq_length() == 26
        decoder.cut()
        assert decoder.cache.get_seq_length() == 24


def test_every_row_of_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_peers, "DTYPES", (torch.float32,))
    rows = list(Bench("10m", QUICK, row_length=64, dense_length=64, context=64).rows())
    assert [row["model"] for row in rows] == ["mamba", "attention", "attention", "attention", "mamba"]
    assert all(row["ratio"] > 0 and row["n"] >= 2 for row in rows)
    about = {"machine": "m", "cores": 1, "torch": "t", "transformers": "u", "size": "10m", "seconds": 1.0, "rows": rows}
    assert table(about).count("\n| ") == 1 + len(rows)

"""The same claims on a CUDA device: parity in float64, gradients against the CPU, and the kernels that are chosen there."""

import pytest
import torch

from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.ops import backends

OURS = {"triton", "flex_attention"}  # need nothing that torch does not bring
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here"),
]
PATTERNS = ("A", "M", "AM", "MMAM")
G, BLOCKS, ROWS = 16, 6, 3


def setting(pattern: str, device: str, dtype: torch.dtype = torch.float64):
    config = ModelConfig(
        pattern=pattern, vocab_size=64, d_model=64, d_ff=96, block_length=G, chunk_length=G, n_heads=4, n_kv_heads=2,
        head_dim=16, d_state=16, ssm_head_dim=16, init_std=0.1,
    )  # fmt: skip
    model = Denoiser(config, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    draws = torch.Generator().manual_seed(1)
    clean = torch.randint(3, 64, (ROWS, BLOCKS * G), generator=draws)
    noisy = clean.view(ROWS, BLOCKS, G).clone()
    noisy[torch.rand(noisy.shape, generator=draws) < 0.5] = config.mask_token_id
    documents = (torch.arange(BLOCKS * G) // (2 * G)).expand(ROWS, -1)
    frontiers = torch.arange(BLOCKS).expand(ROWS, -1)
    return model, clean.to(device), noisy.to(device), frontiers, documents


@pytest.mark.parametrize("pattern", PATTERNS)
def test_cached_equals_training_pass(pattern):
    model, clean, noisy, frontiers, _ = setting(pattern, "cuda")
    expected = model(clean[:, :-G], noisy, frontiers)[..., 3:]
    state = model.start(ROWS, BLOCKS * G)
    logits = model.denoise(noisy[:, 0], state)
    for block in range(BLOCKS):
        assert (logits[..., 3:] - expected[:, block]).abs().max() < 1e-10
        if block + 1 < BLOCKS:
            logits, state = model.advance(clean[:, block * G : (block + 1) * G], noisy[:, block + 1], state)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_outputs_and_gradients_equal_those_of_the_cpu(pattern):
    results = []
    for device in ("cpu", "cuda"):
        model, clean, noisy, frontiers, documents = setting(pattern, device)
        logits = model(clean[:, :-G], noisy, frontiers, documents)[..., 3:]
        logits.log_softmax(-1)[..., 0].sum().backward()
        results.append([logits.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    for here, there in zip(*results):
        assert (here - there).abs().max() < 1e-9 * max(1.0, here.abs().max().item())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_autocast_stays_close(pattern):
    """bfloat16 has 8 bits: logits of size 1 differ by some hundredths over a few layers."""
    model, clean, noisy, frontiers, documents = setting(pattern, "cuda", torch.float32)
    expected = model(clean[:, :-G], noisy, frontiers, documents)[..., 3:]
    with torch.autocast("cuda", torch.bfloat16):
        found = model(clean[:, :-G], noisy, frontiers, documents)[..., 3:].float()
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_no_backend_of_our_own_is_declined():
    table = backends(torch.device("cuda"))
    assert {f"{b.op}: {b.declined}" for b in table if b.name in OURS and b.declined} == set()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 0.06)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_decoding_by_kernels_is_the_float64_training_pass(pattern, dtype, tolerance):
    """Ragged commits too; mean difference over the spread of the logits: 24 or 8 bits, over a few layers."""
    model, clean, noisy, frontiers, _ = setting(pattern, "cpu")
    expected = model(clean[:, :-G], noisy, frontiers)[..., 3:]
    model, clean, noisy = model.to("cuda", dtype), clean.cuda(), noisy.cuda()
    state = model.start(ROWS, BLOCKS * G)

    def close(logits, block: int, rows=slice(None)) -> None:
        error = (logits[rows, :, 3:].double().cpu() - expected[rows, block]).abs().mean()
        assert error < tolerance * expected.std()

    close(model.denoise(noisy[:, 0], state), 0)
    for block in range(1, BLOCKS - 1):
        logits, state = model.advance(clean[:, (block - 1) * G : block * G], noisy[:, block], state)
        close(logits, block)
    last = torch.tensor([1, 0, 1])
    logits, state = model.advance(clean[:, (BLOCKS - 2) * G : -G], noisy[:, BLOCKS - 1], state, blocks=last)
    close(logits, BLOCKS - 1, rows=torch.tensor([0, 2]))
    whole = model.commit(clean[:, : 4 * G], model.start(ROWS, BLOCKS * G))  # prefill of several blocks
    close(model.denoise(noisy[:, 4], whole), 4)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_under_autocast_point_the_same_way(pattern):
    """The training pass in bfloat16, kernels chosen as they are, against float64 on the CPU."""
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model, clean, noisy, frontiers, documents = setting(pattern, device, dtype)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(clean[:, :-G], noisy, frontiers, documents)[..., 3:]
        logits.to(dtype).log_softmax(-1)[..., 0].sum().backward()
        found.append(torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99

"""The README.md of a release: what the model is, how to run it, and what is known of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mezzotint.models.config import ModelConfig, parameter_count, state_bytes

# transformers versions that the export was loaded with, in an environment of torch, transformers and safetensors alone
TRIED = "4.57 and 5.24"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run says about a model, in the order the card lists it."""

    trained: Mapping[str, object]
    dtype: str
    tokenizer_note: str | None = None  # why AutoTokenizer is not served, if it is not


def model_card(config: ModelConfig, facts: Facts) -> str:
    """Markdown with the metadata block that model hubs read."""
    itemsize = 2 if facts.dtype in ("bfloat16", "float16") else 4
    at = {length: state_bytes(config, batch=1, length=length, itemsize=itemsize) for length in (1024, 262_144)}
    layers = {"A": "attention", "M": "Mamba-2"}
    counts = ", ".join(
        f"{config.pattern.count(letter)} {name}" for letter, name in layers.items() if letter in config.pattern
    )
    rows = {
        "parameters": f"{parameter_count(config):,}",
        "layers": f"{len(config.pattern)} ({counts}): `{config.pattern}`",
        "width": config.d_model,
        "block": f"{config.block_length} tokens",
        "vocabulary": config.vocab_size,
        "positions of attention": f"{config.positions}, scaling {config.rope_scaling}"
        if "A" in config.pattern
        else "none",
        "weights": f"{facts.dtype}; A_log, D and dt_bias in float32",
        "decoding state, one row": f"{at[1024]:,} bytes at 1k tokens, {at[262_144]:,} at 256k",
        **facts.trained,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    tokenizer = (
        "" if facts.tokenizer_note is None else f"\nThere is no `tokenizer.json` here: {facts.tokenizer_note}.\n"
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [block-diffusion, mezzotint]
---
# A block-diffusion language model

Text is written block by block: a block starts as masks and is revealed in a few steps, reading an exact cached state of
everything before it. Trained and exported with mezzotint.

| | |
|---|---|
{table}

`training.yaml` holds the whole recipe.

## Use

Needs torch, transformers (tried: {TRIED}) and safetensors. The code of the model lies in this folder.

```python
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
print(model.generate_text(tokenizer, ["def "], max_new_tokens=128, reveal="topk=8")[0])
```

`reveal` says which masks a step reveals: `topk=8` (8 steps a block), `threshold=0.9`, `entropy=0.5` (nats),
`ancestral=16` or `first-hitting`. Temperature 0 is greedy. `model.generate(input_ids)` works on token ids;
`model(input_ids).logits` holds, in row `i`, the prediction of token `i` itself (no shift). The state is at hand through
`model.denoiser`: `start`, `commit`, `denoise`, `advance`.
{tokenizer}
## Limits

A base model: it continues text like its training data and follows no instructions. Nothing was done about bias, private
data or harmful text in the training data.
"""

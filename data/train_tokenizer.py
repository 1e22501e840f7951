"""Owns the training of a sentencepiece tokenizer that gives every text back unchanged."""

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.data.hub import first_line
from mezzotint.data.parts import is_heldout
from mezzotint.data.sources import START, Source, SourceConfig, open_source
from mezzotint.data.tokenizer import EOS, MASK, PAD, SPACE, utf8

KINDS = ("bpe", "unigram")
SMALLEST = 4 + 2 + 256  # control ids, newline and tab, bytes
LINE = 4000  # characters of a training line; sentencepiece leaves out lines of more than 16384 bytes
# Where a line is cut: newlines are pieces of their own, U+2581 and U+2585 are sentencepiece's own signs, and no piece
# may be learned whose name is taken (`<mask>`, `<0x41>`): the trainer would stop at it.
CUT = re.compile(r"[\n\x00\u2581\u2585]|(?<=<)(?=(?:mask|eos|pad|unk|0x[0-9A-F]{2})>)")


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """What to train on, how large, and where to."""

    out: str  # folder that gets tokenizer.model
    source: SourceConfig = field(default_factory=SourceConfig)
    vocab_size: int = 4096  # control ids and the 256 byte pieces included
    kind: str = "bpe"  # or unigram, which takes some twenty times as long
    sample_mb: float = 64.0  # MiB of text that are read, from the start
    heldout: float = 0.0  # as in prepare: documents that will be held out are left out


def train_tokenizer(config: TrainTokenizerConfig) -> Path:
    """Train on the source and return the path of `tokenizer.model`, which appears whole or not at all.

    Ids: 0 `<pad>`, 1 `<eos>`, 2 unknown (never produced), 3 `<mask>`, newline, tab, 256 bytes, then pieces. The
    vocabulary is smaller than asked when the text has no more pieces to learn. Raises InputError.
    """
    import sentencepiece

    if config.kind not in KINDS:
        raise InputError(f"no tokenizer kind {config.kind!r}: choose one of {', '.join(KINDS)}")
    if config.vocab_size <= SMALLEST:
        raise InputError(f"vocab_size is {config.vocab_size}: give more than {SMALLEST} (control ids and bytes alone)")
    if not 0 < config.sample_mb < math.inf:
        raise InputError(f"sample_mb is {config.sample_mb}: give a positive number of MiB")
    if not 0 <= config.heldout < 1:
        raise InputError(f"heldout is {config.heldout}: give a share of the documents from 0 up to, not including, 1")
    model = io.BytesIO()
    lines = _lines(config, open_source(config.source))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            pad_id=0,
            pad_piece=PAD,
            eos_id=1,
            eos_piece=EOS,
            unk_id=2,
            bos_id=-1,
            control_symbols=[MASK],
            required_chars=SPACE,  # a text may hold no space, or few of them: they must be pieces all the same
            max_sentence_length=4 * LINE + 384,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = first_line(error).rpartition("] ")[2]  # without the place in sentencepiece's source
        raise InputError(
            f"sentencepiece cannot train {config.vocab_size} pieces on this text ({reason}): "
            "change --vocab-size or give more text"
        ) from error
    path = Path(config.out) / "tokenizer.model"
    write_bytes(path, model.getvalue())
    return path


def _lines(config: TrainTokenizerConfig, source: Source) -> Iterator[str]:
    """Training lines of the sample; InputError when it holds no text."""
    from tqdm import tqdm

    left = config.sample_mb * 2**20
    total = int(left) if source.total_bytes is None else min(int(left), source.total_bytes)
    found = False
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading the sample", mininterval=0.5, disable=None) as bar:
        for text, key, _ in source.read(START):
            if left <= 0:
                break
            size = len(utf8(text))
            bar.update(size)
            if is_heldout(key, config.heldout):
                continue
            left -= size
            for line in CUT.split(text):
                for start in range(0, len(line), LINE):
                    found = True
                    yield line[start : start + LINE]
    if not found:
        raise InputError(f"there is no text in {source.name} to train a tokenizer on")

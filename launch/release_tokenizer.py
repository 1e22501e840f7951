"""The tokenizer of a release: what training used, and a tokenizer.json from which AutoTokenizer gives the same ids."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mezzotint.data.errors import InputError
from mezzotint.data.tokenizer import EOS, MASK, PAD, SOURCE_JSON, Tokenizer

if TYPE_CHECKING:
    import tokenizers

NORMAL, USER_DEFINED, BPE = 1, 4, 2  # sentencepiece's ModelProto
# what both must give the same ids for, beside the text a test puts to them
PROBE = (
    " a  b\n\n\t\tÅ ﬁ ① don't\u2581\u2581 \u2581x <mask><eos><pad><unk><0x41> \U0001f600 漢字 e\u0301 \x00\r\n"
    "def f(self, *args):\n        return {k: v for k, v in args}  # -----------\n\n\nThe end .\n"
)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Write the tokenizer's own file, tokenizer.json and tokenizer_config.json into `folder`.

    Returns None, or a sentence that says why there is no tokenizer.json. Raises InputError where one was made but gives
    other ids.
    """
    own = tokenizer.files[0]
    if own.suffix == ".model":
        shutil.copyfile(own, folder / "tokenizer.model")
        fast, declined = _from_sentencepiece(own)
        if fast is None:
            return declined
    else:
        shutil.copyfile(own, folder / SOURCE_JSON)  # `load_tokenizer` takes it before tokenizer.json
        fast = _from_json(own)
    names = _add_control_tokens(fast, tokenizer)
    _require_same_ids(fast, tokenizer, names)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(names), indent=2) + "\n", encoding="utf-8"
    )
    return None


def _from_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer | None, str]:
    """A BPE of the same pieces and merges, spaces written as themselves, so that U+2581 is a character like any other.

    A merge of two pieces ranks by the score of what they make, as in sentencepiece. Control, unknown and byte pieces
    take part in no merge, so no text makes them by their names.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # protobuf on the age of the generated file
        from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())  # type: ignore[attr-defined]
    if proto.trainer_spec.model_type != BPE:
        return None, "the sentencepiece model is no BPE, which tokenizer.json could not hold without loss"
    vocabulary = {_text(piece): i for i, piece in enumerate(proto.pieces)}
    if len(vocabulary) != len(proto.pieces):
        return None, "the sentencepiece model has pieces that differ only in U+2581 and space"
    scores = {_text(piece): piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = [
        (score, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges.sort(key=lambda merge: -merge[0])
    unknown = next((text for text, i in vocabulary.items() if proto.pieces[i].type == 2), None)
    fast = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, left, right in merges],
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=False,
        )
    )
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    whole = [_text(piece) for piece in proto.pieces if piece.type == USER_DEFINED]
    fast.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    return fast, ""


def _text(piece) -> str:
    return piece.piece.replace("\u2581", " ") if piece.type in (NORMAL, USER_DEFINED) else piece.piece


def _from_json(path: Path) -> tokenizers.Tokenizer:
    """The same tokenizer without what would add tokens to a text: training adds none."""
    import tokenizers

    values = json.loads(path.read_text(encoding="utf-8"))
    values |= {"post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def _add_control_tokens(fast: tokenizers.Tokenizer, tokenizer: Tokenizer) -> dict[str, str]:
    """Make the three control ids special tokens of `fast`; their names by role."""
    from tokenizers import AddedToken

    names = {}
    roles = {"mask": (MASK, tokenizer.mask_id), "eos": (EOS, tokenizer.eos_id), "pad": (PAD, tokenizer.pad_id)}
    for role, (name, token) in sorted(roles.items(), key=lambda item: item[1][1]):
        name = fast.id_to_token(token) or name
        while fast.token_to_id(name) not in (None, token):  # the file has a token of its own by that name
            name = f"<{name}>"
        names[role] = name
        fast.add_special_tokens([AddedToken(name, normalized=False, special=True)])
        if fast.token_to_id(name) != token:
            raise InputError(
                f"{tokenizer.files[0]} has gaps in its ids, so {role} cannot be {token} in a release: renumber them"
            )
    return names


def _require_same_ids(fast: tokenizers.Tokenizer, tokenizer: Tokenizer, names: dict[str, str]) -> None:
    fast.encode_special_tokens = True  # split_special_tokens in tokenizer_config.json
    text = PROBE + "".join(names.values())
    ids = fast.encode(text, add_special_tokens=False).ids
    if ids != tokenizer.encode(text) or fast.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
        raise InputError(
            f"tokenizer.json made from {tokenizer.files[0]} gives other ids than training used; "
            "use a BPE model made by `mezzotint-data train-tokenizer`"
        )


def _tokenizer_config(names: dict[str, str]) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": name for role, name in names.items()},
        "split_special_tokens": True,  # "<mask>" in a text is text
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 10**30,
        "model_input_names": ["input_ids", "attention_mask"],
    }

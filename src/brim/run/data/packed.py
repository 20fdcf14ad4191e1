"""Text tokenised into a single file of token ids, cut into sequences of equal length."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brim.core.files import regular
from brim.errors import UsageError
from brim.measure.user_cache import build_once, cache_folder, fingerprint
from brim.version import __version__

_READ_BYTES = 1 << 18
_PIECE_CHARACTERS = 1 << 18  # tokenised in one call: some 70 thousand tokens
_TOKENS, _FACTS = "tokens.bin", "tokens.json"
_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A file of ``count`` token ids, 4 bytes each. ``largest``: the largest id. ``digest``: of the ids."""

    path: Path
    count: int
    largest: int
    digest: str

    def read(self, begin: int, end: int) -> list[int]:
        with open(self.path, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), (end - begin) * _DTYPE.itemsize, begin * _DTYPE.itemsize)
        ids = np.frombuffer(raw, dtype=_DTYPE).tolist()
        if len(ids) != end - begin:
            raise UsageError(f"Cannot read {self.path}.", "It is cut short.", "Delete its folder.")
        return [int(token) for token in ids]


def token_row(files: list[Path], documents: Callable[[], Iterable[Iterable[str]]], tokenizer: Any) -> TokenRow:
    """The tokens of ``documents()``, whose text is in ``files``; tokenised once and stored in the user's cache
    folder.

    Each piece of a document is tokenised by itself. A document begins with BOS where the tokenizer adds it, and ends
    with EOS. Raises as ``documents`` does, and TransferError when the disk refuses.
    """
    begins = tokenizer("").input_ids[:1]
    begins = begins if begins == [tokenizer.bos_token_id] else []
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    key = fingerprint(files, __version__, tokenizer_digest(tokenizer), _PIECE_CHARACTERS)

    def ids() -> Iterator[list[int]]:
        for document in documents():
            yield begins
            for piece in document:
                yield tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
            yield ends

    folder = build_once(cache_folder() / "tokens" / f"{files[0].stem}-{key}", lambda into: _write(into, ids()))
    facts = json.loads((folder / _FACTS).read_text())
    return TokenRow(path=folder / _TOKENS, **facts)


def _write(folder: Path, ids: Iterable[list[int]]) -> None:
    count, largest, digest = 0, 0, hashlib.blake2b(digest_size=16)
    with open(folder / _TOKENS, "wb") as file:
        for part in ids:
            if part:
                raw = np.asarray(part, dtype=_DTYPE).tobytes()
                file.write(raw)
                digest.update(raw)
                count, largest = count + len(part), max(largest, *part)
    facts = {"count": count, "largest": largest, "digest": digest.hexdigest()}
    (folder / _FACTS).write_text(json.dumps(facts))


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of all that decides how the tokenizer encodes a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    digest.update(f"{template}{tokenizer.bos_token_id} {tokenizer.eos_token_id}".encode())
    return digest.hexdigest()


def text_pieces(path: Path) -> Iterator[str]:
    """Read a text file on demand, in pieces that can be tokenised separately.

    A piece ends before a line break that follows a word, where byte-level tokenizers split anyway.
    Raises UsageError with the number of the line that is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text_buffer, lines = "", 1
    try:
        with regular(path).open("rb") as file:
            while True:
                raw = file.read(_READ_BYTES)
                text = _decoded(decoder, raw, path, lines)
                lines += text.count("\n")
                text_buffer += text.removeprefix("\ufeff") if not text_buffer else text
                while len(text_buffer) > _PIECE_CHARACTERS:
                    at = _cut(text_buffer)
                    yield text_buffer[:at]
                    text_buffer = text_buffer[at:]
                if not raw:
                    break
    except OSError as error:
        raise UsageError(f"{path} was given as training data.", f"{error.strerror}.") from error
    if text_buffer:
        yield text_buffer


def _decoded(decoder: codecs.IncrementalDecoder, raw: bytes, path: Path, line: int) -> str:
    try:
        return decoder.decode(raw, final=not raw)
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        raise UsageError(
            f"Cannot read {path}, line {line} as training data.", "It is not UTF-8.", "Convert the file."
        ) from error


def _cut(text: str) -> int:
    """Length of the first piece of ``text``: up to the last line that ends in a word, else a space, else anywhere."""
    at = _PIECE_CHARACTERS
    while (at := text.rfind("\n", 1, at)) > 0:
        if text[at - 1].isalnum():
            return at
    space = text.rfind(" ", 1, _PIECE_CHARACTERS)
    return space if space > 0 else _PIECE_CHARACTERS

"""Training data from JSONL and text: tokenised on demand, in an order set by a seed, never all in memory.

data = open_data("chat.jsonl", tokenizer, seq=1024, vocab_size=model.config.vocab_size)
batches = Batches(data, batch=32, seed=0)
for batch in batches:  # endless
    loss = model(**batch).loss
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from brim.core.files import regular
from brim.errors import ModelError, UsageError
from brim.measure.user_cache import build_once, cache_folder, fingerprint
from brim.run.data.chat import ChatEncoder
from brim.run.data.lines import MESSAGES, TEXT, Lines
from brim.version import __version__

IGNORED = -100  # the label that torch's cross-entropy leaves out
_JSONL, _TEXT = (".jsonl", ".ndjson", ".json"), (".txt", ".text", ".md")
_ROUNDS = 6
_READ_BYTES = 1 << 18
_PIECE_CHARACTERS = 1 << 18  # tokenised in one call: some 70 thousand tokens
_TOKENS, _FACTS = "tokens.bin", "tokens.json"
_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a sequence, and a label for each: the id itself or IGNORED. The model shifts the labels."""

    input_ids: list[int]
    labels: list[int]


class Dataset(Protocol):
    """Examples by number.

    ``identity`` is a digest of the content and of the settings that shape it. ``truncated`` counts examples cut so
    far.
    """

    identity: str

    @property
    def truncated(self) -> int: ...

    def __len__(self) -> int: ...

    def example(self, index: int) -> Example: ...


def open_data(
    path: str | Path,
    tokenizer: Any,
    seq: int,
    *,
    vocab_size: int | None = None,
) -> LineDataset | PackedDataset:
    """Open training data: JSONL with ``messages``, ``text``, alpaca's ``instruction`` or ShareGPT's ``conversations``
    in each line, a ``.json`` file with a list of such objects, a text file, or a folder of text files (one document
    each).

    seq: the most tokens of a sequence; a longer JSONL example is cut. vocab_size: rows of the model's embedding; a
    larger token id is an error. Text files become sequences of exactly ``seq`` tokens across documents, with EOS
    between them. In ``messages`` only the assistant's answers have labels.

    Every line of a JSONL file is checked now and tokenised when its example is read; packed text is tokenised once,
    into the user's cache folder. Raises UsageError with file and line number for bad data, ModelError for a
    tokenizer that does not fit.
    """
    if seq < 2:
        raise UsageError(f"Cannot train on sequences of {seq} tokens.", "The shortest possible length is 2.")
    path = Path(path)
    if not _is_jsonl(path):
        files = _text_files(path)
        row = token_row(files, tokenizer)
        return PackedDataset(path, row, tokenizer, seq, vocab_size)
    return LineDataset(Lines(path), tokenizer, seq, vocab_size)


def _is_jsonl(path: Path) -> bool:
    """True for JSONL, False for text. Raises UsageError for anything else."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in _TEXT or suffix in _JSONL:
        return suffix in _JSONL and not path.is_dir()
    if not path.exists():
        raise UsageError(f"{path} was given as training data.", "No such file or directory.", "Check its path.")
    raise UsageError(
        f"{path} was given as training data.",
        f"Its name ends in {path.suffix!r}." if suffix else "Its name has no ending.",
        f"Give a file that ends in {', '.join((*_JSONL, *_TEXT))}.",
    )


def _text_files(path: Path) -> list[Path]:
    """The file, or the text files in the folder. Raises UsageError when there is none, or an empty one."""
    inside = path.iterdir() if path.is_dir() else ()
    files = sorted(entry for entry in inside if entry.suffix.lower() in _TEXT) if path.is_dir() else [path]
    if not files:
        suffixes = ", ".join(_TEXT)
        raise UsageError(f"{path} was given as training data.", "It holds no text files.", f"They end in {suffixes}.")
    for file in files:
        if not any(piece.strip() for piece in text_pieces(file)):
            raise UsageError(f"{file} was given as training data.", "It is empty.", "Give text to learn.")
    return files


class LineDataset:
    """A dataset whose examples are the lines of a file."""

    def __init__(self, lines: Lines, tokenizer: Any, seq: int, vocab_size: int | None) -> None:
        self._lines, self._tokenizer, self._seq = lines, tokenizer, seq
        self._vocab_size = vocab_size
        self._chat = ChatEncoder(tokenizer) if lines.kind == MESSAGES else None
        self._cut = bytearray(len(lines))
        self.identity = _digest(lines.digest, tokenizer_digest(tokenizer), str(seq))

    @property
    def truncated(self) -> int:
        return sum(self._cut)

    def __len__(self) -> int:
        return len(self._lines)

    def example(self, index: int) -> Example:
        """Raises UsageError with the line's number where no token has a label."""
        row, where = self._lines.row(index), self._lines.where(index)
        ids, learnt = self._encode(row, where)
        if self._vocab_size is not None and ids:
            _check_vocabulary(max(ids), self._vocab_size, self._tokenizer, where)
        if len(ids) > self._seq:
            self._note_cut(index, len(ids), where)
        if not any(learnt[1 : self._seq]):  # nothing predicts the first token
            raise _nothing_learnt(where, any(learnt[1:]), len(ids), self._seq)
        labels = [token if is_label else IGNORED for token, is_label in zip(ids, learnt, strict=True)]
        return Example(input_ids=ids[: self._seq], labels=labels[: self._seq])

    def _encode(self, row: dict[str, Any], where: str) -> tuple[list[int], list[bool]]:
        if self._chat is not None:
            return self._chat.encode(row, where)
        ids = list(self._tokenizer(row[TEXT], verbose=False).input_ids)
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return ids, [True] * len(ids)

    def _note_cut(self, index: int, tokens: int, where: str) -> None:
        if not any(self._cut):
            warnings.warn(
                f"{where} has {tokens} tokens and is cut to {self._seq}. Later examples are cut without a warning.",
                stacklevel=3,
            )
        self._cut[index] = 1


class PackedDataset:
    """Concatenated documents, cut every ``seq`` tokens; the remainder at the end is not used."""

    truncated = 0

    def __init__(self, path: Path, row: TokenRow, tokenizer: Any, seq: int, vocab_size: int | None) -> None:
        self._row, self._seq = row, seq
        self.identity = _digest(row.digest, str(seq))
        if vocab_size is not None:
            _check_vocabulary(row.largest, vocab_size, tokenizer, str(path))
        if row.count < seq:
            raise UsageError(
                f"Cannot cut {path} into sequences of {seq} tokens.",
                f"It has only {row.count} tokens.",
                "Use shorter sequences (--seq), or give more text.",
            )

    def __len__(self) -> int:
        return self._row.count // self._seq

    def example(self, index: int) -> Example:
        ids = self._row.read(index * self._seq, (index + 1) * self._seq)
        return Example(input_ids=ids, labels=list(ids))


class Batches:
    """An endless stream of batches of ``batch`` examples.

    The epochs, each shuffled in its own order set by ``seed``, are concatenated; batch k has the examples at
    positions k*batch to (k+1)*batch - 1. So a batch may reach into the next epoch, no example is left out, every
    batch has the same number of examples, and the position is the only state.
    """

    def __init__(self, dataset: Dataset, batch: int, *, seed: int = 0, pad_to: int | None = None) -> None:
        """pad_to: length of every batch (``seq`` gives the promised shape); None pads to the batch's longest
        example."""
        if batch < 1:
            raise UsageError(f"Cannot make batches of {batch} examples.", "A batch has at least one.")
        self._dataset, self._batch, self._pad_to = dataset, batch, pad_to
        self._seed = seed
        self.position = 0  # examples returned so far

    @property
    def truncated(self) -> int:
        """How many examples were cut so far."""
        return self._dataset.truncated

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``: int64, (batch, length), padded on the right.

        There is no attention mask: under causal attention no token attends to the padding on its right, and the
        padding has no label. Raises as ``Dataset.example`` does; the position does not change then.
        """
        examples = [self._example(at) for at in range(self.position, self.position + self._batch)]
        length = self._pad_to or max(len(example.input_ids) for example in examples)
        self.position += self._batch
        return _batched(examples, length)

    def _example(self, position: int) -> Example:
        epoch, index = divmod(position, len(self._dataset))
        return self._dataset.example(shuffled(index, len(self._dataset), f"{self._seed} {epoch}"))

    def steps(self, epochs: float) -> int:
        """Number of batches that cover every example ``epochs`` times."""
        return math.ceil(epochs * len(self._dataset) / self._batch)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"position": self.position, "seed": self._seed, "identity": self._dataset.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at ``state``'s position, in its order; the batch size may differ.

        Raises UsageError when the data, the tokenizer or the sequence length differ.
        """
        if state["identity"] != self._dataset.identity:
            raise UsageError(
                "Cannot resume in the middle of the training data.",
                "The data, the tokenizer or the length of sequences has changed since the checkpoint was written.",
                "Resume with the same data and --seq, or train anew from the checkpoint's model.",
            )
        self.position, self._seed = state["position"], state["seed"]


def one_pass(dataset: Dataset, batch: int, *, pad_to: int) -> Iterator[dict[str, torch.Tensor]]:
    """Every example once, in the order of the data, as ``Batches`` returns them; the last batch may be smaller."""
    for first in range(0, len(dataset), batch):
        examples = [dataset.example(index) for index in range(first, min(first + batch, len(dataset)))]
        yield _batched(examples, pad_to)


def shuffled(index: int, count: int, key: str) -> int:
    """Image of ``index`` under the permutation of range(count) named by ``key``, computed in constant memory.

    A Feistel network over the smallest even number of bits that represents ``count``, repeated until the result is
    in the range (cycle-walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            mixed = hashlib.blake2b(f"{key} {number} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        index = left << half | right
        if index < count:
            return index


def _batched(examples: list[Example], length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": _padded([example.input_ids for example in examples], length, 0),
        "labels": _padded([example.labels for example in examples], length, IGNORED),
    }


def _padded(rows: list[list[int]], length: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows], dtype=torch.int64)


def _check_vocabulary(largest: int, vocab_size: int, tokenizer: Any, where: str) -> None:
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"Cannot use {where} with a model of {vocab_size} tokens.",
            f"The tokenizer produces token {largest} for it ({token!r}).",
            "Use the tokenizer that belongs to the model.",
        )


def _nothing_learnt(where: str, beyond: bool, tokens: int, seq: int) -> UsageError:
    problem = (
        f"None of the first {seq} of its {tokens} tokens belongs to an answer."
        if beyond
        else (f"None of its {tokens} tokens is a target of training.")
    )
    return UsageError(
        f"Cannot use {where} as training data.", problem, "Allow longer sequences (--seq), or leave the line out."
    )


def _digest(*facts: str) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


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


def token_row(files: list[Path], tokenizer: Any) -> TokenRow:
    """The tokens of the documents ``files``, tokenised once and stored in the user's cache folder.

    Each piece of a document is tokenised by itself. A document begins with BOS where the tokenizer adds it, and ends
    with EOS. Raises as ``text_pieces`` does, and TransferError when the disk refuses.
    """
    begins = tokenizer("").input_ids[:1]
    begins = begins if begins == [tokenizer.bos_token_id] else []
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    key = fingerprint(files, __version__, tokenizer_digest(tokenizer), _PIECE_CHARACTERS)

    def ids() -> Iterator[list[int]]:
        for file in files:
            yield begins
            for piece in text_pieces(file):
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

"""Model folders with random weights of released shapes, written by transformers for both sides.

What is measured from files, or beside transformers, loads the same folder on either side. A folder
has a tokenizer of the model's size, byte-level BPE or the Unigram of XLM-RoBERTa, whose words of
three letters are a token each.
Sources of the sizes: config.json of Qwen3, whisper, all-MiniLM-L6-v2, bge-m3,
bge-reranker-v2-m3 and ModernBERT-base.
"""

from __future__ import annotations

import itertools
import json
import shutil
import string
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import generate
import numpy as np
import speech

XLM_R = {
    "model_type": "xlm-roberta", "vocab_size": 250002, "hidden_size": 1024,
    "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "minilm": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512,
        "pad_token_id": 0,
    },
    "bge-m3": XLM_R,
    "reranker": {**XLM_R, "num_labels": 1},
    "modernbert": {
        "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768,
        "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152,
        "max_position_embeddings": 8192, "pad_token_id": 50283, "cls_token_id": 50281,
        "sep_token_id": 50282, "bos_token_id": 50281, "eos_token_id": 50282,
        "local_attention": 128, "global_attn_every_n_layers": 3, "reference_compile": False,
    },
}  # fmt: skip
SMALL = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 514, "pad_token_id": 1,
         "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}  # fmt: skip
SPECIAL = ("<s>", "<pad>", "</s>")
LETTERS = string.ascii_lowercase
SPACE, META = "\u0120", "\u2581"  # a space, as byte-level BPE and Unigram write it


def values_of(kind: str, small: bool = False) -> dict[str, Any]:
    """config.json of a kind: an encoder's name, "qwen3-4b", "whisper-tiny"."""
    family, _, size = kind.partition("-")
    if family == "qwen3":
        return generate.values_of(size)
    if family == "whisper":
        v = speech.vocabulary_of(size)
        return {**speech.values_of(size), "decoder_start_token_id": v.start, "bos_token_id": v.end,
                "eos_token_id": v.end, "pad_token_id": v.end}  # fmt: skip
    values = ENCODERS[kind]
    return {**values, **{k: v for k, v in SMALL.items() if k in values}} if small else values


def write(kind: str, folder: Path, dtype: str, small: bool = False) -> tuple[float, float]:
    """A folder of a kind, random weights of a dtype; seconds that it took, and gigabytes."""
    import torch
    import transformers

    begin = time.perf_counter()
    values = values_of(kind, small)
    config = transformers.AutoConfig.for_model(**values)
    makers = {"qwen3": "AutoModelForCausalLM", "whisper": "AutoModelForSpeechSeq2Seq",
              "reranker": "AutoModelForSequenceClassification"}  # fmt: skip
    maker = getattr(transformers, makers.get(kind.partition("-")[0], "AutoModel"))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = maker.from_config(config, dtype={"f16": torch.float16, "bf16": torch.bfloat16,
                                                 "f32": torch.float32}[dtype])  # fmt: skip
    for name, weight in model.named_parameters():  # as wide as trained ones, so that f16 is no test
        if weight.ndim > 1 and not name.startswith("classifier"):
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    if kind.startswith("whisper"):
        write_speech(folder, kind)
    elif values["model_type"] == "xlm-roberta":
        write_unigram(folder, values["vocab_size"])
    else:
        write_tokenizer(folder, values["vocab_size"], SPECIAL, prompt=kind in ENCODERS)
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return time.perf_counter() - begin, nbytes / 1e9


@contextmanager
def written(kind: str, dtype: str, small: bool = False) -> Iterator[Path]:
    """A folder of a kind while this is entered."""
    with TemporaryDirectory(prefix="benchmark") as temporary:
        folder = Path(temporary) / kind
        seconds, size = write(kind, folder, dtype, small)
        print(f"{kind}: {size:.2f} GB on disk, written in {seconds:.1f} s", flush=True)
        yield folder


@contextmanager
def embedder(model: str, dtype: str = "f16") -> Iterator[str]:
    """What `--model` names while this is entered; of a folder without weights a copy with some."""
    folder = Path(model)
    if not (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        yield model
        return
    with written("minilm", dtype) as root:
        for file in folder.rglob("*"):
            if file.is_file() and file != folder / "config.json":
                where = root / file.relative_to(folder)
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, where)
        yield str(root)


# -- tokenizers ------------------------------------------------------------------------------------


def alphabet() -> list[str]:
    """The letters that stand for the 256 bytes in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (n for n in range(256) if n not in plain)
    return [chr(n) for n in plain] + [chr(256 + i) for i, _ in enumerate(others)]


def write_tokenizer(
    folder: Path, size: int, special: Sequence[str], first: int = 0, prompt: bool = True
) -> None:  # fmt: skip
    """tokenizer.json with so many tokens, the special ones from id `first` on.

    Args:
        prompt: whether a text is put between the first and the third special token.
    """
    room = size - len(special)
    added = [_special(first + i, token) for i, token in enumerate(special)]
    words, merges = alphabet()[:room], []
    for length in (1, 2, 3):  # with a letter more: pairs, then threes, then fours
        heads = [""] if length == 1 else map("".join, itertools.product(LETTERS, repeat=length - 1))
        tails = [SPACE + head for head in heads]
        tails += map("".join, itertools.product(LETTERS, repeat=length))
        more = [(tail, letter) for tail in tails for letter in LETTERS][: room - len(words)]
        merges += more
        words += [a + b for a, b in more]
    ids = [i for i in range(size) if not first <= i < first + len(special)]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
              "use_regex": True}  # fmt: skip
    vocab = {token: first + i for i, token in enumerate(special)} | dict(
        zip(words, ids, strict=False)
    )
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": False, "vocab": vocab,
             "merges": [f"{a} {b}" for a, b in merges]}  # fmt: skip
    after = _pairs(special, first) if prompt else None
    _write(folder, special[1 % len(special)], added_tokens=added, normalizer=None, model=model,
           pre_tokenizer=bytes_, decoder=bytes_, post_processor=after)  # fmt: skip


def write_unigram(folder: Path, size: int) -> None:
    """tokenizer.json with so many tokens and the parts of XLM-RoBERTa's, NFKC for its table."""
    special = (*SPECIAL, "<unk>")
    longer = (itertools.product(LETTERS, repeat=length) for length in (1, 3, 4))
    words = [META + "".join(word) for word in itertools.chain.from_iterable(longer)]
    pieces = [*special, META, *LETTERS, *words][:size]
    space = {"type": "Metaspace", "replacement": META, "prepend_scheme": "always", "split": True}
    one = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    model = {"type": "Unigram", "unk_id": 3, "byte_fallback": False,
             "vocab": [[piece, -1.0 - i / size] for i, piece in enumerate(pieces)]}  # fmt: skip
    _write(folder, special[1], added_tokens=[_special(i, t) for i, t in enumerate(special)],
           normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, one]}, model=model,
           pre_tokenizer=space, decoder=space, post_processor=_pairs(special, 0))  # fmt: skip


def _write(folder: Path, pad: str, **parts: Any) -> None:
    document = {"version": "1.0", "truncation": None, "padding": None, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "pad_token": pad,
    }))  # fmt: skip


def _special(number: int, token: str) -> dict[str, Any]:
    return {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}  # fmt: skip


def _pairs(special: Sequence[str], first: int) -> dict[str, Any]:
    """<s> text </s>, and <s> text </s></s> text </s>."""
    begin, end = ({"SpecialToken": {"id": special[i], "type_id": 0}} for i in (0, 2))
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {special[i]: {"id": special[i], "ids": [first + i], "tokens": [special[i]]}
              for i in (0, 2)}  # fmt: skip
    return {"type": "TemplateProcessing", "single": [begin, one, end],
            "pair": [begin, one, end, end, two, end], "special_tokens": tokens}  # fmt: skip


def words(count: int, seed: int = 0) -> list[str]:
    """Words of three letters, each a token of these tokenizers, as often as words of a language.

    Source: Mandelbrot, "An informational theory of the statistical structure of language", 1953:
    the word of rank r is drawn in proportion to 1 / (r + 2.7).
    """
    every = len(LETTERS) ** 3
    often = 1 / (np.arange(every) + 3.7)
    ranks = np.random.default_rng(seed).choice(every, count, p=often / often.sum())
    numbers = np.random.default_rng(0).permutation(every)[ranks]
    letters = np.array(list(LETTERS))
    n = len(LETTERS)
    return ["".join(letters[[w // n**2, w // n % n, w % n]]) for w in numbers.tolist()]


def write_speech(folder: Path, kind: str) -> None:
    """The tokenizer and generation_config.json of a Whisper."""
    size = kind.partition("-")[2]
    vocabulary = speech.vocabulary_of(size)
    v = vocabulary
    names = {v.end: "endoftext", v.start: "startoftranscript", v.first_time - 6: "translate",
             v.first_time - 4: "startoflm", v.previous: "startofprev", v.no_speech: "nospeech",
             v.no_timestamps: "notimestamps"}  # fmt: skip
    names |= {i: name for name, i in [*v.languages.items(), *v.tasks.items()]}
    special = [f"<|{names.get(n, n)}|>" for n in range(v.end, v.size)]
    write_tokenizer(folder, vocabulary.size, special, vocabulary.end, prompt=False)
    (folder / "generation_config.json").write_text(json.dumps({
        "decoder_start_token_id": vocabulary.start, "eos_token_id": vocabulary.end,
        "bos_token_id": vocabulary.end, "pad_token_id": vocabulary.end,
        "no_timestamps_token_id": vocabulary.no_timestamps,
        "prev_sot_token_id": vocabulary.previous, "is_multilingual": True,
        "lang_to_id": {f"<|{n}|>": i for n, i in vocabulary.languages.items()},
        "task_to_id": dict(vocabulary.tasks), "suppress_tokens": [], "begin_suppress_tokens": [],
    }))  # fmt: skip


def peer_encode(torch: Any, model: str, dtype: Any = None) -> Any:
    """What turns texts into vectors with transformers on the card, sorted by length and padded."""
    from transformers import AutoTokenizer, BertModel

    from centella.weights.folder import find_folder

    folder = find_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = torch.float16 if dtype is None else dtype
    encoder = BertModel.from_pretrained(folder, add_pooling_layer=False).to("cuda", kind).eval()
    most = min(256, encoder.config.max_position_embeddings)

    def encode(texts: list[str], size: int = 512) -> Any:
        vectors = np.empty((len(texts), encoder.config.hidden_size), np.float32)
        ids = tokenizer(texts, truncation=True, max_length=most)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: -len(ids[i]))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt")
            batch = batch.to("cuda")
            with torch.inference_mode():
                states = encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
                real = batch["attention_mask"][..., None]
                mean = (states.float() * real).sum(1) / real.sum(1)
                vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors

    return encode

"""The loop of generation: tokens, text, stops, sampling, sessions, and what it costs."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import bf16
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.chat.messages import ChatTemplate
from centella.tasks.generate import session
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.session import Session, fastest_chunk, next_part
from centella.tasks.load import load
from tests.support.model_common import DATA

FOLDER = DATA / "decoders"
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")
TEXT = "data stays on the device"
NAMES = sorted(p.name for p in FOLDER.iterdir())


@functools.cache
def generator(device: ct.Device, name: str = "qwen3") -> Generator:
    pytest.importorskip("tokenizers")
    return load(FOLDER / name, device, "f32")  # type: ignore[no-any-return]


@functools.cache
def host() -> Generator:
    return generator(ct.device("cpu"))


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_forty_greedy_tokens(device: ct.Device, name: str) -> None:
    stored = np.load(FOLDER / name / "expected.npz")
    generation = generator(device, name).generate(
        stored["ids"][0], max_new_tokens=40, ignore_eos=True
    )
    assert generation.ids == stored["greedy"].tolist()
    assert (generation.finish, generation.prompt_tokens) == ("length", 37)


DRAWN = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("name", "sampling"), [*((n, {}) for n in NAMES), ("qwen3", DRAWN)])
def test_unequal_batch_gives_what_each_gives_alone(
    device: ct.Device, name: str, sampling: dict[str, Any]
) -> None:
    model = generator(device, name)
    prompts: list[Any] = [[9, 8], list(range(3, 60)), list(range(90, 110)), [7]]
    prompts[:1] = ["x"] if name == "qwen3" else prompts[:1]  # which has a tokenizer
    if name == "phi4-mini":  # whose frequencies follow the longest of a batch
        prompts[1] = list(range(3, 21))
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, **sampling}
    together = model.generate(prompts, seed=5, **options)
    for i, prompt in enumerate(prompts):
        alone = model.generate(prompt, seed=5 + i, **options)
        assert together[i] == alone


@pytest.mark.devices(*EVERY)
def test_a_step_is_one_submission_and_four_bytes(device: ct.Device) -> None:
    model, tokens = generator(device), 12
    options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    random: dict[str, Any] = {**options, "temperature": 0.7, "seed": 1}
    for each in (options, random):
        model.generate(TEXT, **each)
        with ct.ledger() as led:
            model.generate(TEXT, **each)
        led.expect(downloads=tokens, download_bytes=4 * tokens, compiles=0)
        assert led.submissions <= tokens + 1
        assert led.allocations <= 1
    with ct.ledger() as led:  # other values: nothing new
        model.generate(TEXT, temperature=1.3, top_p=0.4, min_p=0.1, top_k=9, seed=8, **options)
    led.expect(downloads=tokens, compiles=0)
    assert led.plans <= 1  # of what sets the numbers


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=9, seed=1)])
def test_each_step_is_one_submission(device: ct.Device, batch: int, sampling: Sampling) -> None:
    rows = [[5, 17, 4, 9][i:] for i in range(batch)]
    session = Session(generator(device).model, batch, 64)
    session.choose_by(sampling, rows)
    session.start(rows)
    list(session.run(2))
    for step in range(5):
        if step == 3:  # other numbers are written between steps and captured by none
            session.choose_by(replace(sampling, seed=7) if sampling.seed else sampling, rows)
            device.synchronize()
        with ct.ledger() as led:
            session.step().result()
        led.expect(submissions=1, uploads=0, allocations=0, compiles=0, plans=0, downloads=1,
                   download_bytes=4 * batch)  # fmt: skip


@pytest.mark.devices("cpu", "webgpu")
def test_what_was_read_is_not_read_again(device: ct.Device) -> None:
    model = generator(device)
    ids = list(range(5, 105))
    first = model.generate(ids, max_new_tokens=4, ignore_eos=True)
    longer = [*ids, *first.ids, 9, 8]
    with ct.ledger() as led:
        again = model.generate(longer, max_new_tokens=4, ignore_eos=True)
    assert led.upload_bytes < 4 * len(ids)
    fresh = load(FOLDER / "qwen3", device, "f32").generate(
        longer, max_new_tokens=4, ignore_eos=True
    )
    assert again == fresh
    other = [*ids[:30], 3, *ids[31:]]  # rolled back to the first 30
    assert (
        model.generate(other, max_new_tokens=3, ignore_eos=True).ids
        == load(FOLDER / "qwen3", device, "f32")
        .generate(other, max_new_tokens=3, ignore_eos=True)
        .ids
    )


def test_stream_gives_the_text_in_whole_characters() -> None:
    model = host()
    seen: list[int] = []
    pieces = list(
        model.stream(TEXT, max_new_tokens=60, ignore_eos=True, temperature=1.5, seed=4,
                     on_token=seen.append)
    )  # fmt: skip
    whole = model.generate(TEXT, max_new_tokens=60, ignore_eos=True, temperature=1.5, seed=4)
    assert "".join(pieces) == whole.text
    assert seen == whole.ids
    assert all(pieces)


def test_stop_strings_and_tokens() -> None:
    model = host()
    whole = model.generate(TEXT, max_new_tokens=30, ignore_eos=True)
    assert whole.text is not None
    stop = whole.text[5:8]
    cut = model.generate(TEXT, max_new_tokens=30, ignore_eos=True, stop=[stop, "never there"])
    assert (cut.text, cut.finish) == (whole.text[: whole.text.index(stop)], "stop")
    pieces = "".join(model.stream(TEXT, max_new_tokens=30, ignore_eos=True, stop=stop))
    assert pieces == cut.text
    end = whole.ids[6]
    model.config, kept = replace(model.config, stop_ids=frozenset([end])), model.config
    try:
        ended = model.generate(TEXT, max_new_tokens=30)
        assert ended.ids == whole.ids[: whole.ids.index(end)]
        assert ended.finish == "stop"
        both = model.generate([TEXT, "another"], max_new_tokens=30)
        assert both[0] == ended
        assert both[1] == model.generate("another", max_new_tokens=30)
    finally:
        model.config = kept


def test_a_cache_in_i8(device: ct.Device) -> None:
    """The first tokens are those of a cache in f32; sessions of either are kept apart."""
    model, prompt = generator(device), "data stays on the device"
    most = 6 if device.name == "simulator" else 12
    given: dict[str, Any] = {"max_new_tokens": most, "ignore_eos": True}
    wide, narrow = model.generate(prompt, **given), model.generate(prompt, cache="i8", **given)
    assert narrow.ids[:4] == wide.ids[:4]
    kept = model._sessions.idle.waiting
    assert [s.past.cache.dtype for s in kept] == [ct.i8, ct.f32]
    dim = model.model.config.head_dim
    assert kept[0].past.cache.nbytes * 4 * dim == kept[1].past.cache.nbytes * (dim + 4)
    assert "".join(model.stream(prompt, cache="i8", **given)) == narrow.text
    assert [x.ids for x in model.generate([prompt] * 2, cache="i8", **given)] == [narrow.ids] * 2
    several = model.generate(prompt, cache="i8", n=2, **given)
    assert [x.ids[:4] for x in several] == [narrow.ids[:4]] * 2
    with pytest.raises(DTypeError, match='generate: cache: expected "i8" or None, got'):
        model.generate(prompt, cache="f8", **given)  # type: ignore[call-overload]


def test_an_abandoned_stream_leaves_the_next_one_alone() -> None:
    model = host()
    one, two = model.stream(TEXT, max_new_tokens=40), model.stream("else", max_new_tokens=9)
    begun = [next(one), next(two)]
    rest = "".join(two)
    del one
    assert begun[1] + rest == "".join(model.stream("else", max_new_tokens=9))


def test_context_is_the_end() -> None:
    model = host()
    generation = model.generate([5] * 100, max_new_tokens=100, ignore_eos=True)
    assert (len(generation.ids), generation.finish) == (28, "context")
    dynamic = generator(ct.device("cpu"), "llama-dynamic")
    with pytest.raises(ShapeError, match="the context of the model, got 200; beyond it rope_type"):
        dynamic.generate([5] * 200)
    with pytest.raises(ShapeError, match="fewer than 128 tokens, the context of the model"):
        model.generate([5] * 128)


def test_several_continuations() -> None:
    model = host()
    generations = model.generate(TEXT, n=3, temperature=1.2, seed=2, max_new_tokens=6)
    assert len({tuple(g.ids) for g in generations}) == 3
    assert generations[1] == model.generate(TEXT, temperature=1.2, seed=3, max_new_tokens=6)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ShapeError, "a prompt of one token or more"),
        ([320], {}, ShapeError, "ids from 0 to 319, got 320"),
        ([-1], {}, ShapeError, "ids from 0 to 319, got -1"),
        (b"x", {}, DTypeError, "expected text, ids, or a list of them, got bytes"),
        (3, {}, DTypeError, "got int"),
        ([1.5], {}, DTypeError, "expected text or whole numbers, got float"),
        ([np.array(3), 4], {}, DTypeError, r"prompts\[0\]: expected .* numbers, got ndarray"),
        ("\ud800", {}, ShapeError, "lone surrogate"),
        ("x", {"max_new_tokens": 0}, ShapeError, "max_new_tokens"),
        ("x", {"stop": ""}, DTypeError, "stop: expected strings that are not empty"),
        ("x", {"stop": [3]}, DTypeError, "stop: expected strings"),
        ("x", {"n": 0}, ShapeError, "expected n of 1 or more"),
        ("x", {"temperature": -0.1}, ShapeError, "temperature: expected 0 to 10,000"),
        ("x", {"temperature": float("nan")}, ShapeError, "temperature: expected"),
        ("x", {"top_p": 0.0}, ShapeError, "top_p: expected above 0"),
        ("x", {"top_k": 1.5}, DTypeError, "top_k: expected a whole number"),
        ("x", {"max_new_tokens": 2.5}, DTypeError, "a whole number for max_new_tokens, got 2.5"),
        ("x", {"n": np.float64(2)}, DTypeError, "a whole number for n, got"),
        ("x", {"seed": "a"}, DTypeError, "seed: expected a whole number"),
        ("x", {"loud": 3}, TypeError, "unknown argument loud="),
        ("x", {"loud": 3}, DTypeError, "loud=; sampling takes temperature, top_k, .*, seed$"),
        ("x", {"max_tokens": 3}, DTypeError, "max_tokens=; write max_new_tokens=$"),
        ("x", {"tools": []}, DTypeError, "tools=; write chat.messages, template="),
        ("x", {"model": "a"}, DTypeError, r"model=; ct\.load\(path\) opens a model"),
        ("x", {"on_token": print}, DTypeError, "on_token=; stream and chat take it$"),
        ("x", {"template": {}}, DTypeError, "template=; chat takes it$"),
    ],
)
def test_bad_calls(prompt: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        host().generate(prompt, **options)


def test_an_array_without_axes_is_no_prompt() -> None:
    model = host()
    with ct.Scheduler(model) as scheduler:
        calls: list[tuple[str, Any]] = [("encode", model.encode), ("submit", scheduler.submit)]
        for op, call in calls:
            with pytest.raises(DTypeError, match=f"^{op}: prompt: expected .*, got ndarray"):
                call(np.array(3))
    assert model.encode(np.array([3, 4])) == [3, 4]  # type: ignore[arg-type]


def test_parts_of_a_prompt() -> None:
    assert [next_part(left, 512, 4096) for left in (600, 512, 511, 17, 16, 3)] == [
        512, 512, 512, 32, 16, 16,
    ]  # fmt: skip
    assert [next_part(left, 512, 20) for left in (19, 3)] == [16, 16]
    assert next_part(3, 512, 5) == 2
    assert [next_part(left, 2048, 4096) for left in (2049, 2000, 1100, 600, 512, 500)] == [
        2048, 2048, 1024, 512, 512, 512,
    ]  # fmt: skip


GIB = 1 << 30
QWEN = {"hidden_size": 2560, "intermediate_size": 9728}  # 74 KB of activations a token in bf16
MIXED = {"hidden_size": 2048, "intermediate_size": 6144, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768}  # fmt: skip


@pytest.mark.parametrize(
    ("fast", "total", "budget", "batch", "sizes", "expected"),
    [
        (False, 141 * GIB, None, 1, QWEN, 512), (True, 141 * GIB, None, 1, QWEN, 8192),
        (True, 24 * GIB, None, 1, QWEN, 4096), (True, 141 * GIB, None, 8, QWEN, 2048),
        (True, 8 * GIB, None, 16, QWEN, 2048), (True, None, None, 1, QWEN, 2048),
        (True, 141 * GIB, 24 * GIB, 1, QWEN, 4096), (True, 24 * GIB, 141 * GIB, 1, QWEN, 4096),
        (True, 24 * GIB, None, 1, MIXED, 2048), (True, 141 * GIB, None, 8, MIXED, 2048),
    ],
)  # fmt: skip
def test_as_many_tokens_of_a_prompt_as_there_is_memory_for(
    fast: bool, total: int | None, budget: int | None, batch: int, sizes: dict[str, int],
    expected: int,
) -> None:  # fmt: skip
    """A 64th of what the device has, and of what it was opened with."""
    config = replace(host().model.config, **sizes)
    device = SimpleNamespace(caps=SimpleNamespace(fast_tensor_cores=fast),
                             memory=SimpleNamespace(total=total, budget=budget))  # fmt: skip
    model: Any = SimpleNamespace(device=device, config=config, dtype=bf16)
    assert fastest_chunk(model, batch) == expected


def test_a_long_prompt_in_chunks() -> None:
    model = host()
    ids = [3 + i % 300 for i in range(90)]
    session = Session(model.model, 1, 128)
    session.start([ids], chunk=17)
    chunked = [int(t[0]) for t in session.run(5)]
    assert chunked == model.generate(ids, max_new_tokens=5, ignore_eos=True).ids


# -- folders --------------------------------------------------------------------------------------


def folder_with(path: Path, **files: Any) -> Path:
    folder = path / "model"
    shutil.copytree(FOLDER / "qwen3", folder)
    for name, value in files.items():
        target = folder / f"{name}.json"
        target.write_text(json.dumps(value)) if value is not None else target.unlink()
    return folder


def test_without_a_tokenizer_ids_are_enough(tmp_path: Path) -> None:
    model = load(folder_with(tmp_path, tokenizer=None), "cpu")
    generation = model.generate([5, 6], max_new_tokens=4, ignore_eos=True)
    assert (len(generation.ids), generation.text) == (4, None)
    with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer.*give ids"):
        model.generate("x")


def test_the_folder_says_how_to_sample(tmp_path: Path) -> None:
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7]}
    model = load(folder_with(tmp_path, generation_config=stated), "cpu")
    assert model.config.stop_ids == {2, 7}
    assert (model.config.sampling.temperature, model.config.sampling.top_p) == (0.6, 0.9)
    with_seed = model.generate(TEXT, max_new_tokens=8, seed=1)
    assert with_seed == model.generate(TEXT, max_new_tokens=8, seed=1, temperature=0.6, top_p=0.9)


def test_a_folder_that_penalises_and_does_not_draw(tmp_path: Path) -> None:
    """As transformers: the penalty holds for the likeliest token, too; top_p changes nothing."""
    stated = {"do_sample": False, "repetition_penalty": 9.0, "top_p": 0.1}
    model = load(folder_with(tmp_path, generation_config=stated), "cpu")
    plain = load(FOLDER / "qwen3", "cpu", task="generate")
    wanted = plain.generate(TEXT, max_new_tokens=20, repetition_penalty=9.0, ignore_eos=True).ids
    assert model.generate(TEXT, max_new_tokens=20, ignore_eos=True).ids == wanted
    assert wanted != plain.generate(TEXT, max_new_tokens=20, ignore_eos=True).ids


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"do_sample": True, "top_p": 7}, "top_p: expected"),
        ({"repetition_penalty": "x"}, "repetition_penalty: expected a number, got 'x'"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id: expected an id or several, got \[2, 'x'\]"),
        ({"eos_token_id": "2"}, "eos_token_id: expected an id or several, got '2'"),
    ],
)
def test_a_folder_with_generation_that_cannot_be(
    stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, generation_config=stated)
    with pytest.raises(WeightsError, match=rf"generation_config\.json: {message}"):
        load(folder, "cpu")


# -- chat -----------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_is_the_template_and_the_answer() -> None:
    model = host()
    ids = model.encode_chat(MESSAGES)
    shown = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = "".join(model.chat(MESSAGES, max_new_tokens=6))
    assert answer == model.generate(ids, max_new_tokens=6).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{}]}, r"""tools=; write chat.messages, template={"tools": .* not parsed"""),
        ({"system": "brief"}, """system=; write it as the first message .*"role": "system"""),
        ({"enable_thinking": False}, r"""template={"enable_thinking": \.\.\.}. passes it"""),
        ({"stream": True}, r"stream=; model.stream.prompt. and model.chat.messages. yield"),
    ],
)
def test_arguments_that_chat_has_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DTypeError, match=f"^chat: unknown argument .*{message}"):
        host().chat(MESSAGES, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(2000000) %}{% endfor %}", "1,000,000 rounds"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         "1,000,000 rounds"),
        ("{{ 'a' * 100000000 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% import 'os' as os %}", "loader"),
        ("{{ messages[7].content }}", "chat_template"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_hostile_templates(template: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        ChatTemplate(template, {}, "here").render(MESSAGES)


def test_templates_that_are_none() -> None:
    with pytest.raises(WeightsError, match="here: expected a chat template"):
        ChatTemplate("{% for %}", {}, "here").render(MESSAGES)
    model = host()
    model.template, kept = None, model.template
    try:
        with pytest.raises(WeightsError, match="expected a model folder with a chat template"):
            model.chat(MESSAGES)
    finally:
        model.template = kept


def test_template_of_a_file_of_its_own(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"bos_token": {"content": "<s>"}})
    assert ChatTemplate.from_folder(folder) is None
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content | tojson }}")
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    assert template.render(MESSAGES) == '<s>"hi"'


def test_templates_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b{{ tools }}"}]
    template = ChatTemplate.from_folder(
        folder_with(tmp_path, tokenizer_config={"chat_template": named})
    )
    assert template is not None
    assert (template.render(MESSAGES), template.render(MESSAGES, tools=[1])) == ("a", "b[1]")


def test_logits_that_are_nan_are_an_error_with_the_layer(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.5, "seed": 1}]
    for sampling in options:
        model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
        attention = model.model.layers[1].self_attn
        attention.o_proj.weight = attention.o_proj.weight * float("nan")
        text = r"sequence 0, token 3: the logits are NaN, first in the result of layer 1"
        with pytest.raises(ct.ContractError, match=text):
            model.generate([5, 6, 7], max_new_tokens=3, **sampling)


@pytest.mark.parametrize(
    ("dtype", "advice"), [("f32", "$"), ("bf16", "$"), ("f16", "; dtype='bf16'")]
)
def test_where_nan_comes_from(dtype: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks, with keys and values in the storage of the session; advice where it helps."""
    monkeypatch.setattr(session, "CHUNK", 5)
    model = load(FOLDER / "qwen3", "cpu", dtype, task="generate")
    out, past, asked = model.model.layers[2].self_attn.o_proj, model.model.past, list[Any]()
    out.weight = out.weight * float("nan")

    def spied(*args: Any, **options: Any) -> Any:
        asked.append(options["dtype"])
        return past(*args, **options)

    monkeypatch.setattr(model.model, "past", spied)
    for cache in (None, "i8"):
        with pytest.raises(ct.ContractError, match=f"in the result of layer 2{advice}"):
            model.generate([*range(5, 18)], max_new_tokens=2, cache=cache)
    assert asked == [None, None, ct.i8, ct.i8]  # of the session, then to find the layer


def test_no_memory_to_find_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = host()

    def full(*args: Any, **options: Any) -> Any:
        raise ct.OutOfMemoryError("full")

    monkeypatch.setattr(model.model, "past", full)
    error = session.nan_error("", model.model, [3, 4], None)
    assert "no memory to find the layer" in str(error)


def test_rows_that_share_much_and_little_with_the_batch_before() -> None:
    """What is kept of one row and what is to be read of another together pass the capacity."""
    model = host()
    long, other = list(range(3, 113)), list(range(120, 230))
    options: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
    model.generate([long, [5, 6]], **options)
    together = model.generate([[*long, 9], other], **options)
    assert together == [model.generate(p, **options) for p in ([*long, 9], other)]

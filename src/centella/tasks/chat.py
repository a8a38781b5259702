"""Chat messages to a prompt: the folder's Jinja template, in a sandbox with bounds.

Source: the `chat_template` of transformers' tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from centella.errors import CentellaError, MissingExtraError, WeightsError
from centella.weights.model_files import is_file, read_bytes, read_json, show

ROUNDS = 1_000_000  # of all loops over ranges
LONGEST = 50_000_000  # characters of a prompt, and of a string that is repeated
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """How a model wants a conversation written.

    Args:
        source: the Jinja text.
        tokens: special tokens that it names (bos_token, eos_token).
        origin: the file that it is from, for errors.

    Raises:
        WeightsError: a text that is no template.
        MissingExtraError: jinja2 is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        self.origin = origin
        self._tokens = dict(tokens)
        environment, self._error = _environment()
        try:
            self._template = environment.from_string(source)
        except self._error as error:
            raise WeightsError(f"{origin}: expected a chat template, got: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder; None where it has none.

        Raises:
            WeightsError: a file that is malformed.
        """
        config, file = read_json(folder / CONFIG), folder / TEMPLATE
        source = config.get("chat_template")
        if is_file(file):
            source = read_bytes(file).decode("utf-8", "replace")
        else:
            file = folder / CONFIG
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise WeightsError(f"{file}: chat_template: expected a string, got {show(source)}")
        tokens = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                tokens[name] = content
        return cls(source, tokens, str(file))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **values: Any
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: objects with `role` and `content`.
            answer: whether it ends where the model's answer begins.
            values: further variables of the template (tools, enable_thinking).

        Raises:
            WeightsError: the template fails, refuses the messages, or passes its bounds.
        """
        given = {**self._tokens, **values, "messages": [dict(m) for m in messages],
                 "add_generation_prompt": answer, "range": _Rounds()}  # fmt: skip
        try:
            return "".join(_bounded(self._template.generate(given)))
        except CentellaError as error:
            raise WeightsError(f"{self.origin}: chat_template: {error}") from error
        except (self._error, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
                RecursionError, MemoryError) as error:  # fmt: skip
            raise WeightsError(
                f"{self.origin}: chat_template: {type(error).__name__}: {show(str(error))}"
            ) from error


class _Rounds:
    """Jinja's `range`, with a bound on the rounds of all its loops together."""

    def __init__(self) -> None:
        self._left = ROUNDS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise CentellaError(f"expected at most {ROUNDS:,} rounds of loops, got more")
        return numbers


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > LONGEST:
            raise CentellaError(f"expected a prompt of at most {LONGEST:,} characters, got more")
        yield piece


def _environment() -> tuple[Any, type[Exception]]:
    """A sandbox: no attributes of Python objects, nothing changed, no huge strings; its errors."""
    try:
        from jinja2 import TemplateError, TemplateRuntimeError, ext, sandbox
    except ImportError as error:
        raise MissingExtraError("jinja2", "models") from error

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(v) if isinstance(v, str | list | tuple) else v for v in (left, right)]
            fits = all(isinstance(s, int | float) and abs(s) < LONGEST for s in sizes)
            most = 64 if operator == "**" else LONGEST
            if not fits or abs(sizes[0] * sizes[1]) > LONGEST or abs(sizes[1]) > most:
                raise TemplateRuntimeError(f"operands of {operator} are too large")
            return super().call_binop(context, operator, left, right)

    def refuse(message: Any) -> None:
        raise TemplateRuntimeError(str(message))

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    return environment, TemplateError

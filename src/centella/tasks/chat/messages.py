"""Chat messages to a prompt: the folder's Jinja template, in a sandbox with bounds.

Source: the `chat_template` of transformers' tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from centella.errors import CentellaError, DTypeError, ShapeError, WeightsError
from centella.weights.model_files import is_file, read_bytes, read_json, show

_MESSAGE = '{"role": str, "content": str}'
_MESSAGES = f"[{_MESSAGE}, ..]"
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
LARGEST = 200_000  # characters of a template; published ones have up to 30,000


class ChatTemplate:
    """How a model wants a conversation written.

    Args:
        source: the Jinja text.
        tokens: special tokens that it names (bos_token, eos_token).
        origin: the file that it is from, for errors.
        with_tools: what takes its place where there are tools, of folders with several.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], origin: str,
        with_tools: ChatTemplate | None = None,
    ) -> None:  # fmt: skip
        self.origin = origin
        self._with_tools = with_tools
        self._source = source
        self._tokens = dict(tokens)

    @cached_property
    def _compiled(self) -> tuple[Callable[[dict[str, Any]], str], type[Exception]]:
        """What renders it, and what that raises; at the first use: not every model is used so."""
        from centella.tasks.chat.sandbox import environment, rendered

        sandbox, failure = environment()
        if len(self._source) > LARGEST:
            raise WeightsError(
                f"{self.origin}: expected a chat template of at most {LARGEST:,} characters, got "
                f"{len(self._source):,}"
            )
        try:
            return partial(rendered, sandbox.from_string(self._source)), failure
        except (failure, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise WeightsError(
                f"{self.origin}: expected a chat template, got: {where}{error}"
            ) from error

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
        tokens, with_tools = special_tokens(config), None
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source, tools = named.get("default"), named.get("tool_use")
            with_tools = cls(tools, tokens, str(file)) if isinstance(tools, str) else None
        if source is None:
            return None
        if not isinstance(source, str):
            raise WeightsError(f"{file}: chat_template: expected a string, got {show(source)}")
        return cls(source, tokens, str(file), with_tools)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, answer: bool = True, **values: Any
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: objects with `role` and `content`.
            answer: whether it ends where the model's answer begins.
            values: further variables of the template (tools, enable_thinking).

        Raises:
            WeightsError: a text that is no template; it fails, refuses the messages, or passes its
                bounds.
            MissingExtraError: jinja2 is not installed.
        """
        if self._with_tools is not None and values.get("tools") is not None:
            return self._with_tools.render(messages, answer=answer, **values)
        render, failure = self._compiled
        variables = {**self._tokens, **values, "messages": [dict(m) for m in messages],
                     "add_generation_prompt": answer}  # fmt: skip
        try:
            return render(variables)
        except (CentellaError, failure, ArithmeticError, LookupError, TypeError, ValueError,
                AttributeError, RecursionError, MemoryError) as error:  # fmt: skip
            what = str(error)
            if not isinstance(error, CentellaError):
                what = f"{type(error).__name__}: {show(what)}"
            raise WeightsError(
                f"{self.origin}: chat_template, line {_line_of(error)}: {what}"
            ) from error


def _line_of(error: BaseException) -> int:
    """The innermost line of the template that an error comes from."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens that a tokenizer_config.json names, as templates name them."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def check_messages(op: str, messages: object) -> None:
    """Refuse what is no conversation; a template may take messages without role, or with parts.

    Raises:
        DTypeError: names the message.
        ShapeError: there is none.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise DTypeError(f"{op}: messages: expected {_MESSAGES}, got {show(messages)}")
    if not messages:
        raise ShapeError(f"{op}: messages: expected one message or more, got none")
    for i, message in enumerate(messages):
        fits = isinstance(message, Mapping) and ("role" in message or "content" in message)
        fits = fits and isinstance(message.get("role", ""), str)
        if not fits or not isinstance(message.get("content"), str | list | tuple | None):
            raise DTypeError(f"{op}: messages[{i}]: expected {_MESSAGE}, got {show(message)}")

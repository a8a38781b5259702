"""The prompt of a decoder that ranks: a question, a document, and what to judge them by.

Source: the model card of Qwen3-Reranker.
"""

from __future__ import annotations

from functools import cached_property

from centella.errors import ShapeError, WeightsError
from centella.tasks.text.check_texts import check_text
from centella.tasks.text.tokenizer import Tokenizer
from centella.tasks.text.tokens import Tokens

BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")


class RankPrompt:
    """Writes the prompts of a decoder that ranks.

    Args:
        tokenizer: of the decoder.

    Attributes:
        answers: ids of the tokens "yes" and "no".

    Raises:
        WeightsError: a tokenizer that has not both answers as tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answers: tuple[int, int] = (self._token(ANSWERS[0]), self._token(ANSWERS[1]))

    def _token(self, answer: str) -> int:
        token = self.tokenizer.native.token_to_id(answer)
        if token is None:
            raise WeightsError(
                f"{self.tokenizer.origin}: expected a token {answer!r}, which a decoder that ranks "
                f"answers with, got none"
            )
        return token

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        begin, end = (
            self.tokenizer.native.encode(text, add_special_tokens=False).ids
            for text in (BEGIN, END)
        )
        return begin, end

    def tokens(
        self, queries: list[str], documents: list[str], instruction: str | None, most: int
    ) -> Tokens:
        """The tokens of each prompt, `most` at most: documents are cut at their end.

        Special tokens that stand in the texts are plain text.

        Raises:
            DTypeError: an instruction that is no text; ShapeError: no room for a document.
        """
        asked = INSTRUCTION if instruction is None else instruction
        check_text("rank: instruction", asked)
        begin, end = self._frame
        room = most - len(begin) - len(end)
        if room < 1:
            raise ShapeError(
                f"rank: config.max_length: expected over {most - room} tokens, those of the "
                f"prompt, got {most}"
            )
        pairs = zip(queries, documents, strict=True)
        texts = [f"<Instruct>: {asked}\n<Query>: {q}\n<Document>: {d}" for q, d in pairs]
        written = any(map(self.tokenizer.written.stands_in, texts))
        native = self.tokenizer.written.plain if written else self.tokenizer.native
        bodies = [e.ids[:room] for e in native.encode_batch_fast(texts, add_special_tokens=False)]
        return Tokens.of([[*begin, *body, *end] for body in bodies])

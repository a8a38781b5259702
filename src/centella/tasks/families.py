"""The families of models: what reads each, what it is for, and a model of one on disk."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from centella.weights.model_files import known

if TYPE_CHECKING:
    from centella.models.config import ModelConfig
    from centella.tasks.classify.classifier import Classifier, TokenClassifier
    from centella.tasks.embed.embedder import Embedder
    from centella.tasks.generate.generator import Generator
    from centella.tasks.transcribe.transcriber import Transcriber

    Task: TypeAlias = Embedder | Generator | Classifier | TokenClassifier | Transcriber
    ReadTask: TypeAlias = Callable[[Path, int], Callable[[Any], Task]]


class Family(Struct, frozen=True):
    """An architecture and what it is used for; its module loads with the first model of it.

    Attributes:
        module: the name of its module; config, model: of the classes there.
        reader: "module:function" of this room, which reads what the task has beside its model.
        task: what it is for, one of `TASKS`.
        wide_vectors: whether norms and biases are f32, whatever the dtype of the activations.
        quantizes: whether weights may be quantised as they are loaded.
    """

    module: str
    config: str
    model: str
    reader: str
    wide_vectors: bool = False
    task: str = "embed"
    quantizes: bool = False

    def classes(self) -> tuple[type[ModelConfig], Any]:
        """The class of its config, and that of its model."""
        module = importlib.import_module(self.module)
        return getattr(module, self.config), getattr(module, self.model)

    def read_task(self, folder: Path, vocab_size: int) -> Callable[[Any], Task]:
        """Read what the task has beside a model of so many tokens, which what returns takes."""
        module, name = self.reader.split(":")
        reader: ReadTask = getattr(importlib.import_module(f"centella.tasks.{module}"), name)
        return reader(folder, vocab_size)


TASKS = ("embed", "generate", "classify", "tag", "transcribe")
COMMANDS = {"embed": "embed", "generate": "generate", "classify": "rank",
            "transcribe": "transcribe"}  # fmt: skip
# By the `model_type` of config.json.
FAMILIES = {
    **dict.fromkeys(
        "albert bert camembert distilbert electra gte modernbert mpnet new nomic_bert roberta "
        "xlm-roberta".split(),
        Family("centella.models.bert", "BertConfig", "BertModel", "embed.folder:read_embedder"),
    ),
    **dict.fromkeys(
        "gemma2 gemma3_text granite llama mistral olmo2 phi3 qwen2 qwen3 qwen3_moe smollm3".split(),
        Family(
            "centella.models.llama", "LlamaConfig", "LlamaModel",
            "generate.folder:read_generator", True, "generate", True,
        ),
    ),
    "whisper": Family(
        "centella.models.whisper", "WhisperConfig", "WhisperModel",
        "transcribe.transcriber:read_transcriber", True, "transcribe", True,
    ),
}  # fmt: skip
# Of a decoder in a folder of sentence-transformers, or one that is asked for to embed.
EMBEDDING_DECODER = Family(
    "centella.models.llama_encoder", "LlamaEncoderConfig", "LlamaEncoder",
    "embed.folder:read_decoder_embedder", True, quantizes=True,
)  # fmt: skip
# Of a decoder that is asked for to classify.
RANKING_DECODER = Family(
    "centella.models.llama_ranker", "LlamaRankerConfig", "LlamaRanker",
    "classify.folder:read_ranker", True, "classify", True,
)  # fmt: skip
# Of an encoder with a head, by the end of its `architectures`.
HEADS = {
    f"For{kind}Classification": Family(
        "centella.models.bert_head", "LabelConfig", "LabelModel",
        "classify.folder:read_classifier", task=task,
    )
    for kind, task in (("Sequence", "classify"), ("Token", "tag"))
}  # fmt: skip


class ModelFiles(Struct, frozen=True):
    """A model on disk, its config read and its family known.

    Attributes:
        origin: the folder or file; config_file: where its config is, for errors.
        values: of its config.
        tensors: opens the weights, by the names of a safetensors folder.
        read_task: reads what its task has beside the model.
    """

    origin: str
    config_file: str
    values: dict[str, Any]
    family: Family
    tensors: Callable[[Any], Mapping[str, Any]]
    read_task: Callable[[int], Callable[[Any], Task]]


def family_of(file: str, values: dict[str, Any]) -> Family:
    """The row of a config's `model_type`."""
    return known(file, "model_type", values.get("model_type"), FAMILIES)


def way_to(task: str) -> str:
    """How to use a model of a task."""
    command = COMMANDS.get(task)
    return f'ct.load(.., task="{task}")' + (f", or centella {command}" if command else "")

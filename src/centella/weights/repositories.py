"""Repositories of huggingface.co that users name without their owners."""

from __future__ import annotations

SHOWN = 3  # names of one answer
ALIKE = 0.8  # ratio of difflib for a name with a slip

# Names by their owners; a few of each family that `load` opens.
OWNERS: dict[str, str] = {
    "openai": "whisper-tiny whisper-base whisper-small whisper-medium whisper-large-v2 "
    "whisper-large-v3 whisper-large-v3-turbo whisper-tiny.en whisper-base.en whisper-small.en "
    "whisper-medium.en",
    "distil-whisper": "distil-small.en distil-large-v3",
    "sentence-transformers": "all-MiniLM-L6-v2 all-MiniLM-L12-v2 all-mpnet-base-v2 "
    "all-distilroberta-v1 multi-qa-distilbert-cos-v1 paraphrase-multilingual-MiniLM-L12-v2",
    "BAAI": "bge-small-en-v1.5 bge-base-en-v1.5 bge-large-en-v1.5 bge-m3 bge-reranker-base "
    "bge-reranker-large bge-reranker-v2-m3",
    "intfloat": "e5-small-v2 e5-base-v2 e5-large-v2 multilingual-e5-small multilingual-e5-base "
    "multilingual-e5-large",
    "thenlper": "gte-small gte-base gte-large",
    "Alibaba-NLP": "gte-multilingual-base gte-base-en-v1.5 gte-modernbert-base",
    "mixedbread-ai": "mxbai-embed-large-v1",
    "nomic-ai": "nomic-embed-text-v1.5",
    "Snowflake": "snowflake-arctic-embed-m-v2.0",
    "answerdotai": "ModernBERT-base ModernBERT-large",
    "cross-encoder": "ms-marco-MiniLM-L6-v2 ms-marco-electra-base",
    "Qwen": "Qwen3-0.6B Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-30B-A3B Qwen3-Embedding-0.6B "
    "Qwen3-Reranker-0.6B Qwen2.5-0.5B-Instruct Qwen2.5-7B-Instruct",
    "meta-llama": "Llama-3.2-1B-Instruct Llama-3.2-3B-Instruct Llama-3.1-8B-Instruct",
    "mistralai": "Mistral-7B-Instruct-v0.3",
    "microsoft": "Phi-3-mini-4k-instruct Phi-3.5-mini-instruct",
    "HuggingFaceTB": "SmolLM3-3B SmolLM2-135M-Instruct SmolLM2-1.7B-Instruct",
    "ibm-granite": "granite-3.3-2b-instruct granite-3.3-8b-instruct granite-embedding-english-r2",
    "allenai": "OLMo-2-0425-1B-Instruct OLMo-2-1124-7B-Instruct",
    "google": "gemma-2-2b-it gemma-3-270m-it gemma-3-1b-it embeddinggemma-300m",
}


def repositories_like(name: str) -> list[str]:
    """Repositories that a name without an owner may stand for, at most three.

    The one of that name; else those that have it as a part, the shortest first; else those that
    differ from it by a slip.
    """
    from difflib import get_close_matches

    known = {each.lower(): f"{owner}/{each}" for owner, names in OWNERS.items()
             for each in names.split()}  # fmt: skip
    asked = name.lower()
    if asked in known:
        return [known[asked]]
    within = sorted((each for each in known if f"-{asked}-" in f"-{each}-"), key=len)
    return [known[n] for n in within[:SHOWN] or get_close_matches(asked, known, SHOWN, ALIKE)]

"""The architectures, by the `model_type` of their config.json."""

from centella.models.bert import BertConfig, BertModel

MODELS = {"bert": (BertConfig, BertModel)}

__all__ = ["MODELS", "BertConfig", "BertModel"]

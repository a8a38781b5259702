"""The architectures, one file each; `tasks.families.FAMILIES` has a row for each."""

from centella.models.bert import BertConfig, BertModel

__all__ = ["BertConfig", "BertModel"]

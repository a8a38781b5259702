"""The library proves itself on the user's device: `check_device`, and `check_model` of a folder."""

from centella.check.device import check_device
from centella.check.model import check_model
from centella.check.report import DeviceReport, Failure, Layer, ModelReport, Quantized, Rate, Tokens

__all__ = [
    "DeviceReport", "Failure", "Layer", "ModelReport", "Quantized", "Rate", "Tokens",
    "check_device", "check_model",
]  # fmt: skip

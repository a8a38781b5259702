"""The config.json of BERT-like encoders: what the families share, and where each differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec.structs import replace

from centella.errors import WeightsError
from centella.models.bert_families import FAMILIES, FIXED, NEUTRAL, OF_BERT, TRAINING, Traits
from centella.models.config import ACTIVATIONS, ModelConfig, unknown_field
from centella.models.rope import WIDEST, Rope
from centella.weights.model_files import known, show

MOST_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"


class BertConfig(ModelConfig, frozen=True):
    """The numbers of a BERT-like encoder, the same names for every family.

    Attributes:
        embedding_size: of the tables, which a product widens to the hidden size; 0: that.
        attention_bias, inner_bias, mlp_bias: of the products around attention; of the one that
            widens, and of the one that narrows; norm_bias: of norms.
        relative_attention_num_buckets: distances that have a bias in the scores; 0: none.
        num_hidden_groups, inner_group_num: groups of layers with own weights, and layers of each;
            0: every layer has its own.
        position_offset: row of position 0 in the table.
        windows: of each layer the keys on either side that a query sees; -1: all.
        ropes: rotary embeddings; rope_of: of each layer its index there.
    """

    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(ACTIVATIONS),
        "relative_attention_num_buckets": (0, 32),
        **dict.fromkeys(("attention_bias", "inner_bias", "mlp_bias", "norm_bias"), (True, False)),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden_size", "num_attention_heads"),)
    derived: ClassVar[frozenset[str]] = frozenset(
        ("model_type", "position_offset", "windows", "ropes", "rope_of")
    )
    zero: ClassVar[frozenset[str]] = frozenset(
        ("type_vocab_size", "embedding_size", "num_hidden_groups", "inner_group_num")
    )  # fmt: skip

    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    model_type: str = "bert"
    embedding_size: int = 0
    attention_bias: bool = True
    inner_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    relative_attention_num_buckets: int = 0
    num_hidden_groups: int = 0
    inner_group_num: int = 0
    position_offset: int = 0
    windows: tuple[int, ...] = ()
    ropes: tuple[Rope, ...] = ()
    rope_of: tuple[int, ...] = ()

    @property
    def traits(self) -> Traits:
        """What its family has."""
        return FAMILIES[self.model_type]

    @property
    def qkv_width(self) -> int:
        """Numbers of a token's query, key and value."""
        return 3 * self.hidden_size

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings - self.position_offset

    @property
    def order(self) -> tuple[int, ...]:
        """The layers with own weights, as they follow one another."""
        groups, inner = self.num_hidden_groups, self.inner_group_num
        if not groups:
            return tuple(range(self.num_hidden_layers))
        group_of = (i * groups // self.num_hidden_layers for i in range(self.num_hidden_layers))
        return tuple(g * inner + i for g in group_of for i in range(inner))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: a value is missing or malformed, or a field is set that this library does
                not know: it names it.
        """
        family = values.get("model_type", "bert")
        traits = known(origin, "model_type", family, FAMILIES)
        named = {name: _spelled(name, values, traits) for name in (*OF_BERT, *traits.fields)}
        _refuse_others(values, traits, {*named.values(), *traits.more}, origin)
        own = {name: values[name] for name in traits.more if name in values}
        own |= {name: values[spelled] for name, spelled in named.items() if spelled in values}
        own = {**traits.defaults, **own}
        if own.get("hidden_act") == "swiglu" and traits.gated:
            own["hidden_act"] = "silu"
        if family == "albert":
            own = {"num_hidden_groups": 1, "inner_group_num": 1, **own}
        numbers = own if traits.token_types else {**own, "type_vocab_size": 0}
        config = cls._checked(numbers, named, origin)
        return replace(config, **_derived(config, family, own, origin))

    def sizes(self) -> dict[str, int]:
        """Whole numbers that no tensor's largest extent may be below."""
        left = {"position_offset"} | ({"max_position_embeddings"} if self.traits.rotary else set())
        return {name: size for name, size in super().sizes().items() if name not in left}

    def check_sizes(self, checkpoint: Mapping[str, Any], file: str) -> None:
        """As every config, with the layers that have weights of their own."""
        groups = self.num_hidden_groups * self.inner_group_num
        stored = replace(self, num_hidden_layers=groups) if groups else self
        ModelConfig.check_sizes(stored, checkpoint, file)

    def tensors_of_layer(self) -> int:
        """As every config; a family says how many."""
        return self.traits.layer_tensors


def _spelled(name: str, values: Mapping[str, Any], traits: Traits) -> str:
    """The family's name of a field, the one that is there."""
    names = traits.fields.get(name, (name,))
    return next((n for n in names if n in values), names[0])


def _refuse_others(values: Mapping[str, Any], traits: Traits, read: set[str], origin: str) -> None:
    """Refuse a field that is set and would change the model: unknown, or of another value."""
    fixed = {**FIXED, **traits.fixed}
    known = read | NEUTRAL | {name for names in traits.fields.values() for name in names}
    for name, value in sorted(values.items()):
        if name in known or TRAINING.fullmatch(name):
            continue
        if name in fixed:
            if value is not None and fixed[name] and value not in fixed[name]:
                wanted = ", ".join(map(str, fixed[name]))
                raise WeightsError(f"{origin}: {name}: expected {wanted}, got {show(value)}")
        elif value not in (None, False):
            raise unknown_field(origin, name, value)


def _derived(
    config: BertConfig, family: str, own: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """Fields that follow from others."""
    traits, layers = FAMILIES[family], config.num_hidden_layers
    if layers > MOST_LAYERS and (traits.rotary or config.num_hidden_groups):
        raise WeightsError(
            f"{origin}: num_hidden_layers: expected at most {MOST_LAYERS}, got {layers}"
        )
    derived: dict[str, Any] = {"model_type": family}
    if traits.padded:
        pad = own.get("pad_token_id", 1) if traits.padding is None else traits.padding
        if type(pad) is not int or not 0 <= pad < config.max_position_embeddings - 1:
            raise WeightsError(
                f"{origin}: pad_token_id: expected a whole number below max_position_embeddings, "
                f"got {show(pad)}"
            )
        derived["position_offset"] = pad + 1
    if own.get("rotary_scaling_factor") is not None:  # scaled beyond these positions alone
        trained = own.get("max_trained_positions", 2048)
        if type(trained) is not int or trained < 1:
            raise WeightsError(
                f"{origin}: max_trained_positions: expected a whole number over 0, "
                f"got {show(trained)}"
            )
        derived["max_position_embeddings"] = min(config.max_position_embeddings, trained)
    if traits.rotary:
        derived |= _rotary(config, own, origin)
    return derived


def _rotary(config: BertConfig, own: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Rotary embeddings, and the window of each layer."""
    types = _layer_types(own, config.num_hidden_layers, origin)
    dim = config.hidden_size // config.num_attention_heads
    if own.get("head_dim", dim) != dim:
        raise WeightsError(f"{origin}: head_dim: expected {dim}, got {show(own['head_dim'])}")
    used = list(dict.fromkeys(types))
    ropes = tuple(
        Rope(_rope_values(kind, own, dim, origin), dim, config.max_position_embeddings, origin)
        for kind in used
    )
    for turn in ropes:
        turn.expect_fixed()
    window = own.get("local_attention", 128)
    if type(window) is not int or window < 1:
        raise WeightsError(
            f"{origin}: local_attention: expected a whole number over 0, got {show(window)}"
        )
    return {
        "ropes": ropes, "rope_of": tuple(used.index(kind) for kind in types),
        "windows": tuple(window // 2 if kind == SLIDING else -1 for kind in types),
    }  # fmt: skip


def _layer_types(own: Mapping[str, Any], layers: int, origin: str) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    stated, period = own.get("layer_types"), own.get("global_attn_every_n_layers", 3)
    if stated is not None:
        fits = isinstance(stated, list) and len(stated) == layers
        if not fits or any(kind not in (FULL, SLIDING) for kind in stated):
            raise WeightsError(
                f"{origin}: layer_types: expected {layers} of {FULL}, {SLIDING}, got {show(stated)}"
            )
        return list(stated)
    if "norm_bias" not in own:  # a family whose layers are all alike
        return [FULL] * layers
    if type(period) is not int or period < 1:
        raise WeightsError(
            f"{origin}: global_attn_every_n_layers: expected a whole number over 0, "
            f"got {show(period)}"
        )
    return [SLIDING if i % period else FULL for i in range(layers)]


def _rope_values(kind: str, own: Mapping[str, Any], dim: int, origin: str) -> dict[str, Any]:
    """What `Rope` takes, for layers of a kind."""
    stated = own.get("rope_parameters") or {}
    scaling = own.get("rope_scaling") or {}
    for name, table in (("rope_parameters", stated), ("rope_scaling", scaling)):
        if not isinstance(table, dict):
            raise WeightsError(f"{origin}: {name}: expected an object, got {show(table)}")
    of_kind = stated.get(kind, stated)
    if not isinstance(of_kind, dict):
        raise WeightsError(f"{origin}: rope_parameters: {kind}: expected an object")
    default = own.get("rope_theta", 160_000.0 if kind == FULL else 10_000.0)
    theta = own.get("global_rope_theta" if kind == FULL else "local_rope_theta", default)
    values = {"rope_theta": theta, **scaling, **{k: v for k, v in of_kind.items() if v is not None}}
    if "ntk" not in (values.get("type"), values.get("rope_type")):
        return values
    return _fixed_ntk(values, dim, origin)


def _fixed_ntk(values: Mapping[str, Any], dim: int, origin: str) -> dict[str, Any]:
    """Fixed NTK scaling by a factor f: a theta f times as large, frequencies over f^(2 / dim).

    Source: equation 6 of Su 2023, "Transformer upgrade 11", as GTE's checkpoints have it.
    """
    if values.get("mixed_b") is not None:
        raise WeightsError(f"{origin}: rope_scaling: mixed_b: expected none")
    numbers: list[float] = []
    for name in ("factor", "rope_theta"):
        number: Any = values.get(name)
        if type(number) not in (int, float) or not 0 < number < WIDEST:
            raise WeightsError(f"{origin}: {name}: expected a positive number, got {show(number)}")
        numbers.append(number)
    factor, theta = numbers
    divisors = [factor ** (2 / dim)] * (dim // 2)
    return {"rope_type": "divided", "rope_theta": theta * factor, "divisors": divisors}

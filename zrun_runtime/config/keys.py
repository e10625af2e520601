"""What a key of the config is: its type, default, range, and what it does here.

The schema declares every key once, with `key(default, effect, sentence)`. The effects are

* HONOURED: the key does what it says; the sentence says what that is;
* NO_EFFECT: accepted, changes nothing here; the sentence says why;
* UNSUPPORTED: any value but the default is refused, because leaving it out would change the result; the sentence
  says what to use instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from zrun_runtime.config.notes import NoteKind

Effect = Literal["honoured", "no_effect", "unsupported"]
HONOURED: Effect = "honoured"
NO_EFFECT: Effect = "no_effect"
UNSUPPORTED: Effect = "unsupported"
LARGEST = 2**63 - 1


class Section(BaseModel):
    """One JSON object of the config. `open_ended` sections may hold keys that are not listed (they are not read)."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, protected_namespaces=())
    open_ended: ClassVar[bool] = False


def key(
    default: Any,
    effect: Effect,
    sentence: str,
    *,
    alias: str | None = None,
    stages: tuple[int, ...] = (),
    harmless: tuple[Any, ...] = (),
) -> Any:
    """Declare a key: see the module's docstring.

    Args:
        alias: the name that a config gives it, where that is not the field's.
        stages: the ZeRO stages where it has a meaning; empty: all.
        harmless: values of an UNSUPPORTED key that are taken beside its default.
    """
    extra: dict[str, Any] = {"effect": effect, "stages": list(stages), "harmless": list(harmless)}
    return Field(default, alias=alias, description=sentence, json_schema_extra=extra)


def section(kind: type[Section], effect: Effect = HONOURED, sentence: str = "", stages: tuple[int, ...] = ()) -> Any:
    """Declare a nested object. A NO_EFFECT sentence speaks for all of its keys without an effect of their own."""
    return key(kind(), effect, sentence, stages=stages)


@dataclass(frozen=True)
class KeyEffect:
    """What `key` or `section` declared."""

    effect: Effect
    sentence: str
    stages: tuple[int, ...]
    harmless: tuple[Any, ...]

    def has_meaning(self, stage: int) -> bool:
        """Whether the key means anything at this ZeRO stage."""
        return not self.stages or stage in self.stages

    def at(self, stage: int) -> tuple[NoteKind, str]:
        """The effect at this ZeRO stage and why."""
        if not self.has_meaning(stage):
            return "no_effect", f"it has a meaning at stage {', '.join(map(str, self.stages))} only"
        return ("no_effect" if self.effect == NO_EFFECT else "honoured"), self.sentence


def effect_of(field: FieldInfo) -> KeyEffect | None:
    """What was declared of a field; None if its section speaks for it."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        return None
    declared: dict[str, Any] = extra
    harmless = (field.get_default(call_default_factory=True), *declared["harmless"])
    return KeyEffect(declared["effect"], field.description or "", tuple(declared["stages"]), harmless)


def field_names(kind: type[Section]) -> dict[str, FieldInfo]:
    """Every key of a section by the name that a config gives it."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def section_of(field: FieldInfo) -> type[Section] | None:
    """The Section that a field holds (`X` or `X | None`); None if it holds a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def as_number(value: Any) -> float | int:
    """A JSON number, or a text that spells one ("5e8", YAML's reading of 5e8).

    Raises:
        ValueError: anything else: true, false, null, other text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("must be a number")
    if isinstance(value, str):
        value = _spelt_out(value)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("must be a number of at most 63 bits")
    return value


def _spelt_out(text: str) -> float | int:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError("must be a number")


def as_whole(value: Any) -> int:
    """A whole number, however it is spelt: 500000000, 5e8, "5e8".

    Raises:
        ValueError: not a number, not finite, or not whole.
    """
    try:
        number = as_number(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if isinstance(number, float):
        if not math.isfinite(number) or not number.is_integer() or abs(number) > LARGEST:
            raise ValueError("must be a whole number")
        return int(number)
    return number


Count = Annotated[int, Field(ge=1), BeforeValidator(as_whole)]
Size = Annotated[int, Field(ge=0), BeforeValidator(as_whole)]
SizeOrMinusOne = Annotated[int, Field(ge=-1), BeforeValidator(as_whole)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(as_number)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(as_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(as_number)]

_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def _as_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


DtypeName = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_as_dtype)]
